"""Bandwidth of kernels that are limited by memory, each beside a copy of as many bytes.

    python tools/benchmark/elementwise.py                         all cases, on one GPU
    python tools/benchmark/elementwise.py --cases "swiglu A"      one of them

Bytes are what a kernel must read and write. The copy reads half as many and writes half as many; kernel, copy and the
plain form in torch are timed in turn, as replays of CUDA graphs. Writes elementwise.json into docs/evidence/benchmarks
or --folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.fusions.fused_swiglu import kernel_swiglu, kernel_swiglu_backward
from megatron.core.fusions.fused_weighted_activation import weighted_activation
from tools.benchmark.dispatch import time_in_turn
from tools.benchmark.result import ROOT, write_result

Call = Callable[[], Any]
Case = Callable[[], Iterator[tuple[str, int, Call, Call]]]
"""Yields name of a kernel, bytes that it must move, the kernel, the plain form; operands live as long as the case."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random bf16 numbers [shape] on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


def swiglu_case(num_rows: int, width: int) -> Iterator[tuple[str, int, Call, Call]]:
    """Weighted SwiGLU of the experts, x [R, 2f] with fp32 probabilities [R]."""
    x, grad = normal(num_rows, 2 * width).requires_grad_(), normal(num_rows, width, seed=1)
    probs = torch.rand(num_rows, device="cuda").requires_grad_()
    plain = weighted_activation(x, probs, F.silu, True, fuses=False)

    def plain_backward() -> Any:
        return torch.autograd.grad(plain, (x, probs), grad, retain_graph=True)

    yield (
        "forward",
        x.nbytes + grad.nbytes + probs.nbytes,
        lambda: kernel_swiglu(x, None, probs),
        lambda: weighted_activation(x, probs, F.silu, True, fuses=False),
    )
    yield (
        "backward",
        2 * x.nbytes + grad.nbytes + 2 * probs.nbytes,
        lambda: kernel_swiglu_backward(grad, x, None, probs),
        plain_backward,
    )


CASES: dict[str, Case] = {
    "swiglu A": lambda: swiglu_case(131072, 768),
    "swiglu C": lambda: swiglu_case(16384, 14336),
}
"""Shapes of the model slices."""


def measure(case: Case) -> dict[str, Any]:
    """Time each kernel of a case beside a copy and its plain form."""
    found: dict[str, Any] = {}
    for name, moved, kernel, plain in case():
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        calls = {"kernel": kernel, "copy": lambda s=source, t=target: t.copy_(s), "plain": plain}
        with torch.no_grad():
            times = time_in_turn(calls)
        medians = {key: statistics.median(values) for key, values in times.items()}
        found[name] = {
            "bytes": moved,
            "us": medians["kernel"],
            "gb_per_s": moved / medians["kernel"] / 1000,
            "share_of_copy": medians["copy"] / medians["kernel"],
            "copy_us": medians["copy"],
            "plain_us": medians["plain"],
            "times_us": times,
        }
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks", help="of the result")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU; the same kernels run on a CPU in tests/unit_tests/core/fusions")
    results: dict[str, Any] = {}
    for case in args.cases:
        results[case] = measure(CASES[case])
        for name, row in results[case].items():
            print(
                f"{case:16s} {name:10s} {row['us']:8.1f} us {row['gb_per_s']:6.0f} GB/s = "
                f"{row['share_of_copy']:4.0%} of a copy; plain {row['plain_us']:8.1f} us",
                flush=True,
            )
        write_result(args.folder / "elementwise.json", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
