"""Speed of the experts' grouped products on a GPU, in TFLOP/s, at the shapes of the model slices.

    python tools/benchmark/grouped_gemm.py                       forward, dgrad, wgrad by torch; wgrad into fp32 by ours
    python tools/benchmark/grouped_gemm.py --sweep               tile configurations of our kernel; prints table rows
    python tools/benchmark/grouped_gemm.py --groups random       uneven groups

`wgrad` by torch rounds to bf16 and overwrites; `wgrad+` adds to fp32 main gradients: by torch, as the rounded product
and an addition, and by our kernel. Variants of a shape are timed in turn, one call each, and medians are reported.
Writes grouped-gemm.json (grouped-gemm-sweep.json) into docs/evidence/benchmarks or --folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.fusions.grouped_wgrad import LARGE, SMALL, config_for, describe, grouped_wgrad
from tools.benchmark import timing
from tools.benchmark.result import ROOT, write_result

REPEATS = 20
SLEEP_CYCLES = 500_000


@dataclass(frozen=True)
class Shape:
    """Rows [R, in] times n matrices [out, in]."""

    name: str
    num_rows: int
    in_features: int
    out_features: int
    num_experts: int

    @property
    def flop(self) -> float:
        """Operations of one product."""
        return 2.0 * self.num_rows * self.in_features * self.out_features


SHAPES = (
    Shape("A fc1", 131072, 2048, 1536, 64),
    Shape("A fc2", 131072, 768, 2048, 64),
    Shape("A fc1 mbs1", 32768, 2048, 1536, 64),
    Shape("B fc1", 32768, 7168, 4096, 16),
    Shape("B fc2", 32768, 2048, 7168, 16),
    Shape("C fc1", 16384, 4096, 28672, 4),
    Shape("C fc2", 16384, 14336, 4096, 4),
)
CANDIDATES = (
    LARGE,
    replace(LARGE, skews=False),
    replace(LARGE, band=8),
    SMALL,
    replace(SMALL, skews=True),
    replace(SMALL, band=16),
)


def group_sizes(shape: Shape, kind: str) -> list[int]:
    """Rows of each expert, all of them used up."""
    if kind == "even":
        return [shape.num_rows // shape.num_experts] * shape.num_experts
    weights = torch.rand(shape.num_experts, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sizes = (weights / weights.sum() * shape.num_rows).long()
    sizes[-1] += shape.num_rows - sizes.sum()
    return sizes.tolist()


def operands(shape: Shape, kind: str) -> dict[str, torch.Tensor]:
    """Random bf16 operands, fp32 main gradients and the group ends, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(torch.bfloat16)

    matrix = (shape.num_experts, shape.out_features, shape.in_features)
    ends = torch.tensor(group_sizes(shape, kind), device="cuda").cumsum(0, dtype=torch.int32)
    return {
        "rows": normal(shape.num_rows, shape.in_features),
        "grad": normal(shape.num_rows, shape.out_features),
        "weight": normal(*matrix),
        "main": torch.zeros(*matrix, device="cuda"),
        "ends": ends,
    }


def variants(x: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Products to be timed, by name."""
    grad, rows, weight, main, ends = x["grad"], x["rows"], x["weight"], x["main"], x["ends"]
    return {
        "fwd torch": lambda: torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends),
        "dgrad torch": lambda: torch._grouped_mm(grad, weight, offs=ends),
        "wgrad torch": lambda: torch._grouped_mm(grad.t(), rows, offs=ends),
        "wgrad+ torch": lambda: main.add_(torch._grouped_mm(grad.t(), rows, offs=ends)),
        "wgrad+ ours": lambda: grouped_wgrad(main, grad, rows, ends),
    }


def sleep() -> None:
    """Let the GPU sleep, so that the launch of what is timed costs nothing, as in a captured step."""
    torch.cuda._sleep(SLEEP_CYCLES)


def time_in_turn(calls: dict[str, Callable[[], Any]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Milliseconds of every call behind a sleep, variants interleaved."""
    return timing.time_in_turn(calls, repeats, sleep)


def measure(shape: Shape, kind: str, is_sweep: bool) -> dict[str, Any]:
    """Time one shape; returns {variant: {ms, tflops, times_ms}}."""
    x = operands(shape, kind)
    calls = variants(x)
    if is_sweep:
        calls = {name: calls[name] for name in ("wgrad torch", "wgrad+ torch")}
        for config in CANDIDATES:
            calls[describe(config)] = lambda config=config: grouped_wgrad(
                x["main"], x["grad"], x["rows"], x["ends"], config
            )
        calls = {name: call for name, call in calls.items() if runs(name, call)}
    found = {}
    for name, times in time_in_turn(calls).items():
        median = statistics.median(times)
        found[name] = {"ms": median, "tflops": shape.flop / median / 1e9, "times_ms": times}
    return found


def runs(name: str, call: Callable[[], Any]) -> bool:
    """Try a configuration once; one that asks for too much shared memory is named and left out."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  the compiler's errors have no common type
        print(f"left out: {name}: {type(error).__name__}: {str(error)[:120]}", flush=True)
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time the tile configurations of our kernel")
    parser.add_argument("--groups", choices=("even", "random"), default="even", help="sizes of the groups")
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES], metavar="NAME")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks", help="of the result")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU; the same products run on a CPU in tests/unit_tests/core/fusions")
    results: dict[str, Any] = {}
    for shape in SHAPES:
        if shape.name not in args.shapes:
            continue
        results[shape.name] = measure(shape, args.groups, args.sweep)
        ordered = results[shape.name].items()
        if args.sweep:
            ordered = sorted(ordered, key=lambda item: item[1]["ms"])
            used = config_for(shape.out_features, shape.in_features)
            print(f"{shape.name}: the table has {describe(used)}")
        for name, figures in ordered:
            print(f"{shape.name:12s} {figures['tflops']:7.0f} TFLOP/s {figures['ms']:8.3f} ms  {name}", flush=True)
    name = f"grouped-gemm{'-sweep' if args.sweep else ''}{'-random' if args.groups == 'random' else ''}.json"
    write_result(args.folder / name, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
