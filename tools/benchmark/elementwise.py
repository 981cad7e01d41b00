"""Bandwidth of kernels that are limited by memory, each beside a copy of as many bytes.

    python tools/benchmark/elementwise.py                         all cases, on one GPU
    python tools/benchmark/elementwise.py --cases "swiglu A"      one of them
    python tools/benchmark/elementwise.py --sweep                 the same under other tilings, the fastest first

Bytes are what a kernel must read and write. The copy reads half as many and writes half as many; kernel, copy and the
plain form in torch are timed in turn, as replays of CUDA graphs. A plain backward is captured with its forward before
it, whose time is taken off. Writes elementwise.json (elementwise-sweep.json) into docs/evidence/benchmarks or --folder.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.fusions import fused_qkv_heads, fused_rope, fused_swiglu
from megatron.core.fusions.fused_norm import rms_norm
from megatron.core.fusions.fused_qkv_heads import HeadNorms, kernel_heads, kernel_heads_backward
from megatron.core.fusions.fused_rope import RotaryTables, apply_rotary, kernel_rotary
from megatron.core.fusions.fused_swiglu import kernel_swiglu, kernel_swiglu_backward
from megatron.core.fusions.fused_weighted_activation import weighted_activation
from tools.benchmark.dispatch import time_calls
from tools.benchmark.result import ROOT, write_result

Call = Callable[[], Any]
Case = Callable[[], Iterator[tuple[str, int, Call, Call]]]
"""Yields name of a kernel, bytes that it must move, the kernel, the plain form; operands live as long as the case."""

BACKWARD = "backward"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random bf16 numbers [shape] on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


def with_backward(plain: Call, leaves: list[torch.Tensor], grads: list[torch.Tensor]) -> Call:
    """The plain form with gradients of leaves [...] for those of its results [...], on one stream."""

    def both() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(plain(), leaves, grads)

    return both


def swiglu_case(num_rows: int, width: int) -> Iterator[tuple[str, int, Call, Call]]:
    """Weighted SwiGLU of the experts, x [R, 2f] with fp32 probabilities [R]."""
    x, grad = normal(num_rows, 2 * width).requires_grad_(), normal(num_rows, width, seed=1)
    probs = torch.rand(num_rows, device="cuda").requires_grad_()

    def plain() -> torch.Tensor:
        return weighted_activation(x, probs, F.silu, True, fuses=False)

    yield (
        "forward",
        x.nbytes + grad.nbytes + probs.nbytes,
        lambda: kernel_swiglu(x, None, probs),
        plain,
    )
    yield (
        BACKWARD,
        2 * x.nbytes + grad.nbytes + 2 * probs.nbytes,
        lambda: kernel_swiglu_backward(grad, x, None, probs),
        with_backward(plain, [x, probs], [grad]),
    )


def angles(positions: int, channels: int) -> RotaryTables:
    """Tables in bf16 [s, 1, 1, d] of some angles."""
    angle = torch.outer(torch.arange(positions), 1e6 ** (-torch.arange(channels // 2) * 2 / channels))
    return RotaryTables.from_angles(torch.cat((angle, angle), dim=-1)[:, None, None].cuda(), torch.bfloat16)


def rotary_case(shape: tuple[int, int, int, int, int]) -> Iterator[tuple[str, int, Call, Call]]:
    """Rotary embedding of the queries inside a QKV product [s, b, g, r + 2, c]."""
    mixed, tables = normal(*shape), angles(shape[0], shape[-1])
    query = mixed[:, :, :, :-2].flatten(2, 3).requires_grad_()
    grad, moved = normal(*query.shape, seed=1), 2 * query.nbytes + 2 * tables.cos.nbytes

    def plain() -> torch.Tensor:
        return apply_rotary(query, tables, fuses=False)

    yield "forward", moved, lambda: kernel_rotary(query, tables), plain
    turn_back = functools.partial(kernel_rotary, grad, tables, backward=True)
    yield BACKWARD, moved, turn_back, with_backward(plain, [query], [grad])


def plain_heads(mixed: torch.Tensor, norms: HeadNorms, tables: RotaryTables) -> list[torch.Tensor]:
    """Query, key and value of mixed [s, b, g, r + 2, c] by torch."""
    query, key, value = mixed.split([mixed.shape[3] - 2, 1, 1], dim=3)
    query = rms_norm(query.flatten(2, 3), norms.query_weight, norms.eps)
    key = rms_norm(key.squeeze(3), norms.key_weight, norms.eps)
    return [apply_rotary(query, tables, fuses=False), apply_rotary(key, tables, fuses=False), value.squeeze(3)]


def heads_case(shape: tuple[int, int, int, int, int]) -> Iterator[tuple[str, int, Call, Call]]:
    """Split, norms and rotary embedding of a QKV product [s, b, g, r + 2, c]."""
    mixed, tables = normal(*shape).requires_grad_(), angles(shape[0], shape[-1])
    weights = [normal(shape[-1], seed=seed).requires_grad_() for seed in (1, 2)]
    norms = HeadNorms(*weights, 1e-6, False)
    plain = functools.partial(plain_heads, mixed, norms, tables)
    grads = tuple(normal(*head.shape, seed=3) for head in plain())
    normed = grads[0].nbytes + grads[1].nbytes
    moved = 2 * normed + 2 * tables.cos.nbytes
    yield "forward", moved, lambda: kernel_heads(mixed, norms, tables, False), plain
    yield (
        BACKWARD,
        normed + 2 * mixed.nbytes + 2 * tables.cos.nbytes,
        lambda: kernel_heads_backward(grads, mixed, norms, tables, False),
        with_backward(plain, [mixed, *weights], list(grads)),
    )


CASES: dict[str, Case] = {
    "swiglu A": lambda: swiglu_case(131072, 768),
    "swiglu C": lambda: swiglu_case(16384, 14336),
    "rotary A": lambda: rotary_case((4096, 4, 4, 10, 128)),
    "heads A": lambda: heads_case((4096, 4, 4, 10, 128)),
    "heads C": lambda: heads_case((4096, 2, 8, 6, 128)),
}
"""Shapes of the model slices."""

HEADS_BACKWARD = {
    BACKWARD: [
        {"BACKWARD_TILE": tile, "BACKWARD_WARPS": w, "STAGES": stages, "PROGRAMS": programs}
        for tile, w, stages in ((1024, 2, 1), (1024, 4, 1), (2048, 4, 1), (2048, 8, 1), (2048, 4, 2), (2048, 8, 2))
        for programs in (528, 1056, 2048, 4096)
    ]
}

SWEEPS: dict[str, tuple[ModuleType, dict[str, list[dict[str, int]]]]] = {
    "swiglu A": (
        fused_swiglu,
        {
            way: [
                {f"{way.upper()}_TILE": tile, f"{way.upper()}_WARPS": w} for tile in (1024, 2048, 4096) for w in (4, 8)
            ]
            for way in ("forward", BACKWARD)
        },
    ),
    "rotary A": (fused_rope, {"forward": [{"TILE": t, "WARPS": w} for t in (1024, 2048, 4096) for w in (4, 8)]}),
    "heads A": (
        fused_qkv_heads,
        {
            "forward": [{"FORWARD_TILE": tile, "FORWARD_WARPS": w} for tile in (1024, 2048, 4096) for w in (2, 4, 8)],
            **HEADS_BACKWARD,
        },
    ),
    "heads C": (fused_qkv_heads, HEADS_BACKWARD),
}
"""Settings of the module that launches the kernels of a case."""


@contextmanager
def setting(module: ModuleType, values: dict[str, int]) -> Iterator[None]:
    """Give constants of a module other values inside the block."""
    kept = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(kept)


def sweep(case: str) -> dict[str, Any]:
    """Time the kernels of a case under every setting; {kernel: {setting: microseconds}}, the fastest first."""
    module, settings = SWEEPS[case]
    found: dict[str, Any] = {}
    with torch.no_grad():
        for name, _, kernel, _ in CASES[case]():
            times = {}
            for values in settings.get(name, []):
                with setting(module, values):
                    label = ", ".join(f"{key.lower()} {value}" for key, value in values.items())
                    times[label] = statistics.median(time_calls({label: kernel})[label])
            found[name] = dict(sorted(times.items(), key=lambda item: item[1]))
    return found


def measure(case: str) -> dict[str, Any]:
    """Time each kernel of a case beside a copy and its plain form."""
    found: dict[str, Any] = {}
    for name, moved, kernel, plain in CASES[case]():
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        calls = {"kernel": kernel, "copy": lambda s=source, t=target: t.copy_(s), "plain": plain}
        with torch.no_grad():
            times = time_calls(calls)
        medians = {key: statistics.median(values) for key, values in times.items()}
        found[name] = {
            "bytes": moved,
            "us": medians["kernel"],
            "gb_per_s": moved / medians["kernel"] / 1000,
            "share_of_copy": medians["copy"] / medians["kernel"],
            "copy_us": medians["copy"],
            "plain_us": medians["plain"] - (found["forward"]["plain_us"] if name == BACKWARD else 0.0),
            "times_us": times,
        }
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--sweep", action="store_true", help="time the kernels under other tilings")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks", help="of the result")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU; the same kernels run on a CPU in tests/unit_tests/core/fusions")
    results: dict[str, Any] = {}
    for case in args.cases:
        if args.sweep and case not in SWEEPS:
            continue
        results[case] = sweep(case) if args.sweep else measure(case)
        for name, figures in results[case].items():
            print("\n".join(f"{case} {name}: {line}" for line in described(figures)), flush=True)
        write_result(args.folder / f"elementwise{'-sweep' if args.sweep else ''}.json", results)
    return 0


def described(figures: dict[str, Any]) -> list[str]:
    """Lines that tell the figures of a kernel."""
    if "share_of_copy" not in figures:
        return [f"{time_us:8.1f} us  {label}" for label, time_us in figures.items()]
    return [
        f"{figures['us']:8.1f} us {figures['gb_per_s']:6.0f} GB/s = {figures['share_of_copy']:4.0%} of a copy; "
        f"plain {figures['plain_us']:8.1f} us"
    ]


if __name__ == "__main__":
    sys.exit(main())
