"""Sweep of the cuts of the experts' weight gradients on a GPU: bf16 and FP8, each form of the kernel.

    python tools/benchmark/wgrad_sweep.py                    all families and shapes, within about a minute
    python tools/benchmark/wgrad_sweep.py --family ring      one of triton, ring, fp8, fp8-ring

A family runs in a process of its own with a time limit: a kernel that hangs or reads where it must not is reported, and
the others go on. Before, all candidates are compiled by several processes at once, on a small problem each, into the
cache that the families read. A candidate's sums are compared with those of the family's reference before it is timed:
bit by bit for bf16, within the rounding of fp32 for FP8. One whose sums differ is reported, not timed.

Times are medians of calls in turn, beside torch's bf16 product. Writes wgrad-sweep.json into docs/evidence/benchmarks
or --folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.fusions.fp8_grouped_gemm import WGRAD_LINES, Cut, ScaledCodes, grouped_wgrad_product
from megatron.core.fusions.grouped_wgrad import LARGE, SMALL, WgradConfig, grouped_wgrad, num_free_sms
from megatron.core.fusions.ring_wgrad import LONE, SHARED, Operand, ring_wgrad
from tools.benchmark.grouped_gemm import SHAPES, Shape, time_in_turn
from tools.benchmark.result import ROOT, write_result

REPEATS = 7
COMPILERS = 8
COMPILE_SECONDS, FAMILY_SECONDS = 30, 20
FP8_BOUND = 1e-4
"""Largest difference of two orders of summation, relative to the largest sum."""
TIMED = (
    *(shape for shape in SHAPES if shape.name in ("A fc1", "A fc2", "B fc1", "C fc1")),
    Shape("A fc1 one GPU", 131072, 2048, 1536, 128),
    Shape("A fc2 one GPU", 131072, 768, 2048, 128),
)
SMALL_SHAPES = tuple(Shape(f"small {n}", 64 * n, 256, 256, n) for n in (64, 128, 4))
"""One for each way in which Triton specialises a kernel."""
TRITON = (LARGE, SMALL)
RING = (LONE, SHARED, replace(SHARED, band=16))
FP8 = (WGRAD_LINES, replace(WGRAD_LINES, prefetches=False))
FP8_RING = (LONE, SHARED)
FAMILIES: dict[str, tuple[Any, ...]] = {"triton": TRITON, "ring": RING, "fp8": FP8, "fp8-ring": FP8_RING}


class Problem:
    """Operands of one shape with even groups, bf16 or codes, and main gradients fp32 [n, out, in]."""

    def __init__(self, shape: Shape, has_codes: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

        count, (outs, ins) = shape.num_experts, (shape.out_features, shape.in_features)
        step = shape.num_rows // count
        self.ends = torch.arange(1, count + 1, device="cuda", dtype=torch.int32) * step
        self.grad, self.rows = normal(shape.num_rows, outs), normal(shape.num_rows, ins)
        self.main = torch.zeros(count, outs, ins, device="cuda")
        if has_codes:
            self.left, self.right = (self._codes(part, count) for part in (self.grad, self.rows))

    def _codes(self, values: torch.Tensor, count: int) -> ScaledCodes:
        """Codes [features, R] with a scale for each expert's lines [n, features]."""
        scale = torch.rand(count, values.shape[1], device="cuda") + 0.5
        return ScaledCodes(values.t().contiguous().to(torch.float8_e4m3fn), scale)

    def call(self, candidate: Any) -> Callable[[], None]:
        """A candidate's kernel on this problem."""
        main, ends, sms = self.main, self.ends, num_free_sms(self.main.device)
        if isinstance(candidate, WgradConfig):
            return partial(grouped_wgrad, main, self.grad, self.rows, ends, candidate)
        if isinstance(candidate, Cut):
            return partial(grouped_wgrad_product, main, self.left, self.right, ends, has_strips=False, cut=candidate)
        grad, rows = Operand(self.grad), Operand(self.rows)
        if hasattr(self, "left"):
            grad, rows = (Operand(part.codes, part.scale) for part in (self.left, self.right))
        return partial(ring_wgrad, main, grad, rows, ends, sms, candidate)

    def sums(self, candidate: Any) -> torch.Tensor:
        """What a candidate adds twice to zeros, [n, out, in]."""
        self.main.zero_()
        call = self.call(candidate)
        call()
        call()
        torch.cuda.synchronize()
        return self.main


def name_of(candidate: Any) -> str:
    """Type and fields on one line."""
    return f"{type(candidate).__name__} " + " ".join(f"{name}={value}" for name, value in asdict(candidate).items())


def tell(**fields: Any) -> None:
    """One line of JSON for the process that waits."""
    print(json.dumps(fields), flush=True)


def verdict(got: torch.Tensor, wanted: torch.Tensor, has_codes: bool) -> str:
    """Why sums [n, out, in] are wrong, or nothing."""
    if torch.equal(got, wanted):
        return ""
    gap = float((got - wanted).abs().max() / wanted.abs().max())
    return "" if has_codes and gap < FP8_BOUND else f"sums differ by {gap:.1e} of the largest"


def time_family(family: str) -> None:
    """Check and time one family's candidates at every shape."""
    has_codes = family.startswith("fp8")
    reference = FP8[0] if has_codes else SMALL
    for shape in TIMED:
        problem = Problem(shape, has_codes)
        wanted = problem.sums(reference).clone()
        calls: dict[str, Callable[[], Any]] = {
            "wgrad torch": partial(torch._grouped_mm, problem.grad.t(), problem.rows, offs=problem.ends)
        }
        for candidate in FAMILIES[family]:
            name = name_of(candidate)
            try:
                wrong = verdict(problem.sums(candidate), wanted, has_codes)
            except Exception as error:  # noqa: BLE001  the compiler's errors have no common type
                wrong = f"{type(error).__name__}: {str(error)[:200]}"
                if "CUDA error" in wrong:
                    tell(shape=shape.name, name=name, wrong=wrong)
                    return  # nothing runs on this device any more in this process
            if wrong:
                tell(shape=shape.name, name=name, wrong=wrong)
            else:
                calls[name] = problem.call(candidate)
        for name, times in time_in_turn(calls, repeats=REPEATS).items():
            median = statistics.median(times)
            tell(shape=shape.name, name=name, ms=median, tflops=shape.flop / median / 1e9)
        del problem, wanted, calls
        torch.cuda.empty_cache()


def compile_share(number: int) -> None:
    """Compile every COMPILERS-th candidate of all families for every way in which it is specialised."""
    jobs = [(family, candidate) for family, candidates in FAMILIES.items() for candidate in candidates]
    for family, candidate in jobs[number::COMPILERS]:
        for shape in SMALL_SHAPES:
            try:
                Problem(shape, family.startswith("fp8")).sums(candidate)
            except Exception as error:  # noqa: BLE001  told again when the family is timed
                tell(shape=shape.name, name=name_of(candidate), wrong=f"{type(error).__name__}: {str(error)[:200]}")
                break


def child(*words: str) -> subprocess.Popen[str]:
    """This command again, in a process of its own."""
    return subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """What a child told, and how it ended if not well."""
    try:
        text, _ = process.communicate(timeout=max(seconds, 0.1))
        ending = "" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        ending = f"ran longer than {seconds:.0f} s"
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")], ending


def sweep(families: list[str]) -> dict[str, Any]:
    """{shape: {family candidate: {ms, tflops, of_torch} or {wrong}}}."""
    results: dict[str, Any] = {}
    start = time.monotonic()
    compilers = [child("--compile", str(number)) for number in range(COMPILERS)]
    for number, process in enumerate(compilers):
        found, ending = finish(process, start + COMPILE_SECONDS - time.monotonic())
        for line in found:
            print(f"while compiling: {line['shape']}: {line['wrong']}: {line['name']}", flush=True)
        if ending:
            print(f"compiling process {number}: {ending}", flush=True)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    for family in families:
        found, ending = finish(child("--time", family), FAMILY_SECONDS)
        if ending:
            print(f"{family}: {ending}", flush=True)
        for line in found:
            shape, name = line.pop("shape"), f"{family} {line.pop('name')}"
            results.setdefault(shape, {})[name] = line
            if "ms" in line:
                line["of_torch"] = results[shape][f"{family} wgrad torch"]["ms"] / line["ms"]
                figures = f"{line['tflops']:5.0f} TFLOP/s {line['ms']:7.3f} ms {line['of_torch']:.2f} of torch"
            else:
                figures = f"WRONG: {line['wrong']}"
            print(f"{shape:14s} {figures}  {name}", flush=True)
    return results


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="what to time")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks", help="of the result")
    parser.add_argument("--compile", type=int, metavar="NUMBER", help=argparse.SUPPRESS)
    parser.add_argument("--time", choices=FAMILIES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.compile is not None:
        compile_share(args.compile)
    elif args.time is not None:
        time_family(args.time)
    elif not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU; the same sums run on a CPU in tests/unit_tests/core/fusions")
    else:
        write_result(args.folder / "wgrad-sweep.json", sweep(args.family))
    return 0


if __name__ == "__main__":
    sys.exit(main())
