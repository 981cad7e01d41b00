"""Speed of FP8 on a GPU: quantisers beside a copy, the experts' grouped products in TFLOP/s.

    python tools/benchmark/fp8.py --what quantise     bytes read and written per second, and the share of a copy's
    python tools/benchmark/fp8.py --what casts        the same for cuts of the kernel that casts
    python tools/benchmark/fp8.py --what swiglu       the same for SwiGLU and its gradient as codes, beside two steps
    python tools/benchmark/fp8.py --what products     forward, dgrad, wgrad per recipe and format, fast and precise
    python tools/benchmark/fp8.py --what sweep        cuts of our kernels

Variants of a shape are timed in turn, one call each, and medians are reported; quantisers and copies are replayed from
graphs of some launches, as in a captured step, so that the host's launches are not what is timed. Products take
operands that are quantised already. Writes fp8-<what>.json into docs/evidence/benchmarks or --folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.fp8.gemm import add_grouped_wgrad, grouped_matmul, with_spread_scale
from megatron.core.fp8.operand import quantize_activation, quantize_weight
from megatron.core.fp8.quantize import AmaxHistory
from megatron.core.fp8.recipes import RECIPES, Scaling
from megatron.core.fusions.fp8_grouped_gemm import Cut, ScaledCodes, grouped_rows_product, grouped_wgrad_product
from megatron.core.fusions.fp8_quantize import CastCut, Given, Mode, cast
from megatron.core.fusions.fp8_swiglu import swiglu_codes, swiglu_gradient_codes
from megatron.core.fusions.fused_swiglu import kernel_swiglu, kernel_swiglu_backward
from tools.benchmark.grouped_gemm import SHAPES, Shape, group_sizes, operands, runs, sleep, time_in_turn
from tools.benchmark.result import ROOT, write_result
from tools.benchmark.timing import time_replays

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"e4m3": E4M3, "hybrid": E5M2}
RECIPES_TIMED = ("tensorwise", "rowwise", "blockwise")
"""Delayed scaling runs the products of tensorwise scaling."""
QUANTISED_SIZES = ((131072, 2048), (131072, 1536), (16384, 4096), (16384, 28672))
LAUNCHES = 5
"""of a quantiser in one timed graph"""
MATRIX_CUTS = (
    CastCut(high=16, num_warps=4),
    CastCut(high=16, num_warps=4, band=16),
    CastCut(high=16, columns=64, num_warps=4),
    CastCut(high=16, num_warps=8),
    CastCut(columns=64, num_warps=4),
    CastCut(high=8, num_warps=4),
)
CAST_CUTS = {
    Mode.MATRIX: MATRIX_CUTS,
    Mode.LINES: MATRIX_CUTS,
    Mode.STRIPS: (
        CastCut(),
        CastCut(max_registers=80),
        CastCut(num_warps=16),
        CastCut(num_warps=16, max_registers=64),
        CastCut(num_warps=16, max_registers=40),
        CastCut(high=16, low=8),
    ),
}
SWIGLU_CUTS = (
    CastCut(high=16, num_warps=4),
    CastCut(high=16, columns=64, num_warps=4, max_registers=None),
    CastCut(high=8, num_warps=4, max_registers=None),
    CastCut(high=8, columns=64, num_warps=2, max_registers=None),
    CastCut(high=16, columns=64, num_warps=8, max_registers=None),
)
SWIGLU_SIZE = (131072, 768)
"""Rows and inner width: slice A."""
ONE_GPU = Shape("A fc1 one GPU", 131072, 2048, 1536, 128)
"""Slice A with all its experts on one GPU: half as many rows for each."""
SWEEP_SHAPES = ("A fc1", "A fc2", "B fc1", "C fc1")
SWEPT = {"rowwise": E5M2, "blockwise": E4M3}
"""Recipe -> dtype of its gradients."""
ROW_CUTS = (
    Cut(64, 128, num_warps=4),
    Cut(),
    Cut(num_stages=3),
    Cut(band=8),
)
WGRAD_CUTS = (
    Cut(band=8),
    Cut(64, 128, num_warps=4, programs_per_sm=2),
    Cut(128, 64, num_warps=4, programs_per_sm=2),
)


def quantised(shape: Shape, kind: str, recipe: str, dtype: torch.dtype) -> dict[str, Any]:
    """Operands of one recipe; group sizes are rounded to its multiple."""
    spec, plain = RECIPES[recipe], operands(shape, kind)
    sizes = [size // spec.row_multiple * spec.row_multiple for size in group_sizes(shape, kind)]
    ends = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
    return {
        "x": quantize_activation(plain["rows"], spec, E4M3, ends),
        "dy": quantize_activation(plain["grad"], spec, dtype, ends),
        "w": quantize_weight(plain["weight"], spec, E4M3),
        "main": plain["main"],
        "ends": ends,
    }


def product_calls(shape: Shape, kind: str, recipe: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The products as layers call them, and both ways of adding up."""
    q = quantised(shape, kind, recipe, dtype)
    x, dy, w, ends = q["x"], q["dy"], q["w"], q["ends"]
    calls: dict[str, Callable[[], Any]] = {}
    for name, is_fast in (("fast", True), ("precise", False)):
        calls[f"fwd {name}"] = partial(grouped_matmul, x.by_row, w.by_row, ends, torch.bfloat16, is_fast)
        calls[f"dgrad {name}"] = partial(grouped_matmul, dy.by_row, w.by_column, ends, torch.bfloat16, is_fast)
    calls["wgrad+ precise"] = partial(add_grouped_wgrad, q["main"], dy.by_column, x.by_column, ends)
    return calls


def time_products(kind: str, shapes: list[str]) -> dict[str, Any]:
    """{shape: {recipe format product: {ms, tflops}}}."""
    results: dict[str, Any] = {}
    for shape in (shape for shape in SHAPES if shape.name in shapes):
        results[shape.name] = {}
        for recipe in RECIPES_TIMED:
            for name, dtype in FORMATS.items():
                timed = time_in_turn(product_calls(shape, kind, recipe, dtype), repeats=10)
                results[shape.name].update(report(shape, f"{recipe} {name}", timed))
    return results


def report(shape: Shape, front: str, timed: dict[str, list[float]]) -> dict[str, Any]:
    """Print and return medians."""
    found = {}
    for name, times in timed.items():
        median = statistics.median(times)
        found[f"{front} {name}"] = {"ms": median, "tflops": shape.flop / median / 1e9, "times_ms": times}
        print(f"{shape.name:12s} {shape.flop / median / 1e9:6.0f} TFLOP/s {median:8.3f} ms  {front} {name}", flush=True)
    return found


def torch_product(rows: ScaledCodes, weight: ScaledCodes, ends: torch.Tensor) -> torch.Tensor:
    """The rows product precise, by torch's kernel."""
    return torch._scaled_grouped_mm(
        rows.codes, weight.codes.transpose(1, 2), rows.scale, weight.scale, offs=ends, out_dtype=torch.bfloat16
    )


def time_sweep(kind: str, shapes: list[str], recipes: list[str]) -> dict[str, Any]:
    """Our kernels with every cut, precise and by blocks: rows product and weight gradient."""
    results: dict[str, Any] = {}
    for shape in (shape for shape in (*SHAPES, ONE_GPU) if shape.name in shapes):
        results[shape.name] = {}
        for recipe in recipes:
            dtype = SWEPT[recipe]
            q, has_strips = quantised(shape, kind, recipe, dtype), recipe == "blockwise"
            count, ends = shape.num_experts, q["ends"]
            rows = with_spread_scale(q["x"].by_row, shape.num_rows, 1)
            weight = with_spread_scale(q["w"].by_row, count, shape.out_features, 1)
            left = with_spread_scale(q["dy"].by_column, count, shape.out_features)
            right = with_spread_scale(q["x"].by_column, count, shape.in_features)
            calls: dict[str, Callable[[], Any]] = {}
            if not has_strips:
                calls["rows torch"] = partial(torch_product, rows, weight, ends)
            for cut in ROW_CUTS:
                options = {"has_strips": has_strips, "is_fast": False, "cut": cut}
                calls[f"rows {cut}"] = partial(grouped_rows_product, rows, weight, ends, torch.bfloat16, **options)
            for cut in WGRAD_CUTS:
                calls[f"wgrad {cut}"] = partial(
                    grouped_wgrad_product, q["main"], left, right, ends, has_strips=has_strips, cut=cut
                )
            calls = {name: call for name, call in calls.items() if runs(name, call)}
            timed = time_in_turn(calls, repeats=7)
            ordered = dict(sorted(timed.items(), key=lambda item: (item[0][:5], statistics.median(item[1]))))
            results[shape.name].update(report(shape, recipe, ordered))
    return results


def time_replayed(calls: dict[str, Callable[[], Any]], moved: dict[str, float], title: str) -> dict[str, Any]:
    """{call: {ms, bytes, gb_per_s, of_copy}}; the call "copy" is the measure."""
    found: dict[str, Any] = {}
    for name, replays in time_replays(calls, LAUNCHES, repeats=10, fence=sleep).items():
        times = [us / 1000 for us in replays]
        median = statistics.median(times)
        speed = moved[name] / median / 1e6
        found[name] = {"ms": median, "bytes": moved[name], "gb_per_s": speed, "times_ms": times}
        found[name]["of_copy"] = speed / found["copy"]["gb_per_s"]
        print(f"{title} {speed:6.0f} GB/s {median:7.3f} ms {found[name]['of_copy']:.2f} of a copy  {name}", flush=True)
    return found


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Normal numbers bf16 [rows, columns]."""
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(rows, columns, generator=generator, device="cuda").to(torch.bfloat16)


def ends_of(rows: int) -> torch.Tensor:
    """Row ends int32 [8] of experts that have as many rows each."""
    return torch.arange(1, 9, device="cuda", dtype=torch.int32) * (rows // 8)


def history() -> AmaxHistory:
    """What a delayed recipe knows after some steps."""
    return AmaxHistory(torch.full((), 4.0, device="cuda"), torch.zeros((), device="cuda"))


def time_quantisers() -> dict[str, Any]:
    """{size: {recipe direction: ...}}; bytes are those that have to move.

    An element is 2 bytes, its code 1. Scales of whole tensors or rows need a reading of their own, unless a history
    knows them; those of blocks come with the cast, and are 4 bytes for 128 elements and orientation.
    """
    results: dict[str, Any] = {}
    for rows, columns in QUANTISED_SIZES:
        values = matrix(rows, columns)
        copy, count = torch.empty_like(values), values.numel()
        ends = ends_of(rows)
        calls: dict[str, Callable[[], Any]] = {"copy": partial(copy.copy_, values)}
        moved: dict[str, float] = {"copy": 4 * count}
        for name, spec in RECIPES.items():
            given = history() if spec.uses_history else None
            has_one_pass = spec.uses_history or spec.scaling is Scaling.BLOCK
            scales = count / 32 if spec.scaling is Scaling.BLOCK else 0
            for direction, options, orientations in (("both", {}, 2), ("row", {"by_column": False}, 1)):
                call = partial(quantize_activation, values, spec, E4M3, ends, given, **options)
                calls[f"{name} {direction}"] = call
                moved[f"{name} {direction}"] = (2 if has_one_pass else 4) * count + orientations * (count + scales)
        results[f"{rows}x{columns}"] = time_replayed(calls, moved, f"{rows}x{columns}")
    return results


def time_casts() -> dict[str, Any]:
    """{size: {mode cut: ...}}: the casting kernel alone in both orientations, with every cut."""
    results: dict[str, Any] = {}
    for rows, columns in QUANTISED_SIZES[1:2]:
        values = matrix(rows, columns)
        copy, count, known = torch.empty_like(values), values.numel(), history()
        amax, ends = torch.zeros(1, dtype=torch.int32, device="cuda"), ends_of(rows)
        lines = Given(rows=torch.ones(1, rows, device="cuda"), columns=torch.ones(len(ends), columns, device="cuda"))
        given = {Mode.MATRIX: Given(amax, known.past, known.noted), Mode.LINES: lines, Mode.STRIPS: Given()}
        calls: dict[str, Callable[[], Any]] = {"copy": partial(copy.copy_, values)}
        moved: dict[str, float] = {"copy": 4 * count}
        for mode, known_of_mode in given.items():
            for cut in CAST_CUTS[mode]:
                name = f"{mode.name} {cut}"
                call = partial(cast, values.unsqueeze(0), E4M3, mode, known_of_mode, ends, cut=cut)
                if runs(name, call):
                    calls[name], moved[name] = call, 4 * count
        found = time_replayed(calls, moved, f"{rows}x{columns}")
        results[f"{rows}x{columns}"] = dict(sorted(found.items(), key=lambda item: (item[0][:6], item[1]["ms"])))
    return results


def time_swiglu() -> dict[str, Any]:
    """{size: {direction cut: ...}}: SwiGLU and its gradient as codes with every cut, and as two steps."""
    rows, width = SWIGLU_SIZE
    x, grad, probs = matrix(rows, 2 * width), matrix(rows, width), torch.rand(rows, device="cuda")
    ends, recipe, known = ends_of(rows), RECIPES["delayed"], history()
    given = Given(past=known.past, noted=known.noted)
    calls: dict[str, Callable[[], Any]] = {
        "copy": partial(torch.empty_like(x).copy_, x),
        "forward two steps": lambda: quantize_activation(kernel_swiglu(x, None, probs), recipe, E4M3, ends, known),
        "backward two steps": lambda: quantize_activation(
            kernel_swiglu_backward(grad, x, None, probs)[0], recipe, E4M3, ends, known
        ),
    }
    for cut in SWIGLU_CUTS:
        calls[f"forward {cut}"] = partial(swiglu_codes, x, probs, E4M3, Mode.MATRIX, given, ends, cut=cut)
        calls[f"backward {cut}"] = partial(
            swiglu_gradient_codes, (grad, x, probs), E4M3, Mode.MATRIX, given, ends, cut=cut
        )
    calls = {name: call for name, call in calls.items() if runs(name, call)}
    moved = {name: (6.0 if name.startswith("forward") else 10.0) * grad.numel() for name in calls}
    timed = time_replayed(calls, {**moved, "copy": 4.0 * x.numel()}, f"{rows}x{width}")
    return {f"{rows}x{width}": dict(sorted(timed.items(), key=lambda item: (item[0][:8], item[1]["ms"])))}


QUANTISERS = {"quantise": time_quantisers, "casts": time_casts, "swiglu": time_swiglu}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=(*QUANTISERS, "products", "sweep"), required=True)
    parser.add_argument("--groups", choices=("even", "random"), default="even", help="sizes of the groups")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="of products and sweep")
    parser.add_argument("--recipes", nargs="+", choices=tuple(SWEPT), default=list(SWEPT), help="of the sweep")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks", help="of the result")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    if args.what in QUANTISERS:
        results = QUANTISERS[args.what]()
    else:
        if args.what == "sweep":
            results = time_sweep(args.groups, args.shapes or list(SWEEP_SHAPES), args.recipes)
        else:
            results = time_products(args.groups, args.shapes or [shape.name for shape in SHAPES])
    write_result(args.folder / f"fp8-{args.what}.json", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
