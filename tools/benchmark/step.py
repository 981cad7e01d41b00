"""Time of a training step of a model slice, optimizer included.

    python tools/benchmark/step.py --slice A                         eager and captured, on one GPU
    python tools/benchmark/step.py --slice C --variants drop-pad     one row; --gpus 2 for two GPUs
    python tools/benchmark/step.py --slice A --variants overflow     every step overflows its row budget and is repeated
    python tools/benchmark/step.py --slice A --variants graph --precisions bf16 fp8
    python tools/benchmark/step.py --slice A --variants graph --kernels     kernels of one step by name (kernels.py)

A slice is a launch file in tools/benchmark/slices; a variant and a precision add flags to it. Every row is a run of its
own: two eager steps, from the third on what the variant asks for; the steps after that are timed by the training log.
Rows are written one by one to step-<slice>-<gpus>gpu.json in docs/evidence/benchmarks or --folder, beside other rows
from before: raw times, losses, overflows, peak memory, clocks, commit, and what the result depends on.

A row counts if its losses are finite and no timed step was repeated; of `overflow` all were, from one capture. Its
losses are compared with those of a row with the same extra flags, as far as both went (a slice names the steps over
which its learning rate falls, so that a shorter run begins alike): in FP8 the same variant in bf16, else the eager run,
else the captured one. In FP8 the mean difference may be 1 % of the mean loss, in bf16 the difference 1 % in every
step. The verdict names the row, or says that there is none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.kernels import kernel_table, lines, read_trace
from tools.benchmark.result import ROOT, commit, write_result
from tools.run_metrics import parse_log

SLICES = ("A", "C")
REFERENCE, BASELINE = "eager", "bf16"
GRAPH = "--cuda-graph-impl full_iteration"
VARIANTS = {
    REFERENCE: "",
    "graph": GRAPH,
    "budget": f"{GRAPH} --moe-expert-rank-capacity-factor 1.1",
    "drop-pad": f"{GRAPH} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "overflow": f"{GRAPH} --moe-expert-rank-capacity-factor 0.9 --train-iters 14",
}
"""Name of a row -> flags."""
PRECISIONS = {BASELINE: "", "fp8": "--fp8-format e4m3 --fp8-recipe delayed"}
"""Name -> flags. Of the FP8 recipes that one reads each matrix once and has the fastest products."""
OVERFLOW = "overflow"
FIRST_TIMED_STEP = 4
LIMIT_SECONDS = 110
LOSS_TOLERANCE = 1e-2
EVIDENCE = ROOT / "docs" / "evidence" / "benchmarks"
_PEAK = re.compile(r"memory \(MB\) .*max allocated: ([\d.]+) .*max reserved: ([\d.]+)")


def launch(slice_name: str, flags: str, gpus: int) -> tuple[list[str], str, float, int]:
    """Run a slice; returns its command, its log, the seconds that it took and its exit code."""
    file = ROOT / "tools" / "benchmark" / "slices" / f"{slice_name}.sh"
    words = ["env", f"GPUS={gpus}", f"PYTHON={sys.executable}", "bash", str(file), *shlex.split(flags)]
    begin = time.monotonic()
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    return words, done.stdout, time.monotonic() - begin, done.returncode


def clocks() -> str:
    """SM and memory clocks after a run, as the driver tells them."""
    question = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(question, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def read_row(log: str) -> dict[str, Any]:
    """The figures of a run from its log."""
    metrics = parse_log(log)
    timed = [step for step in sorted(metrics["lm loss"]) if step >= FIRST_TIMED_STEP]
    raw = [metrics["elapsed time per iteration (ms)"][step] for step in timed]
    flops = [metrics["throughput per GPU (TFLOP/s/GPU)"][step] for step in timed]
    peaks = [tuple(map(float, match)) for match in _PEAK.findall(log)]
    overflows = metrics.get("row overflows", {})
    return {
        "step_ms": statistics.median(raw),
        "tflops_per_gpu": statistics.median(flops),
        "raw_ms": raw,
        "losses": list(metrics["lm loss"].values()),
        "overflows_in_timed_steps": sum(overflows.get(step, 0) for step in timed),
        "peak_allocated_mb": max((peak[0] for peak in peaks), default=None),
        "peak_reserved_mb": max((peak[1] for peak in peaks), default=None),
        "counters": next((line for line in log.splitlines() if "counters:" in line), ""),
        "clocks": clocks(),
    }


def reference_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row among `rows` whose losses `row` must have; None if none can be compared with it."""
    found = {
        old["variant"]: old
        for old in rows
        if old["precision"] == BASELINE and old["flags"] == row["flags"] and "losses" in old
    }
    wanted = [row["variant"], REFERENCE, "graph"]
    if row["precision"] == BASELINE:
        wanted = [variant for variant in wanted if variant != row["variant"]]
    return next((found[variant] for variant in wanted if variant in found), None)


def difference(losses: list[float], others: list[float], precision: str) -> float:
    """How far losses are from those of a comparable row.

    In bf16 the largest relative difference of a step. Rounding to FP8 moves a curve to and fro, and where a loss falls
    by a tenth in one step that is percents of it; there it is the sum of all differences over the sum of the losses.
    """
    pairs = list(zip(losses, others, strict=False))
    if precision == BASELINE:
        return max(abs(a - b) / abs(b) for a, b in pairs)
    return sum(abs(a - b) for a, b in pairs) / sum(b for _, b in pairs)


def judge(row: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """Why a row does not count; "counts" if it does."""
    if not all(math.isfinite(loss) for loss in row["losses"]):
        return "a loss is not finite"
    num_repeated, num_timed = row["overflows_in_timed_steps"], len(row["raw_ms"])
    if row.get("variant") == OVERFLOW:
        if num_repeated < num_timed:
            return f"only {num_repeated:.0f} of {num_timed} timed steps overflowed"
        if "'graph captures': 1," not in row["counters"]:
            return "the graph did not survive"
    elif num_repeated:
        return "timed steps were repeated"
    if reference is None:
        return "counts, without another run beside it"
    name = f"{reference['variant']} {reference['precision']} at {str(reference['commit'])[:10]}"
    off = difference(row["losses"], reference["losses"], row["precision"])
    if off <= LOSS_TOLERANCE:
        return f"counts, losses within {off:.1e} of {name}"
    return f"losses differ by {off:.1e} from {name}"


def list_kernels(slice_name: str, variant: str, precision: str, flags: str, gpus: int, folder: Path) -> bool:
    """Profile step FIRST_TIMED_STEP of a row, print and write its kernels; False if the run failed."""
    with tempfile.TemporaryDirectory() as traces:
        window = f"--profile-step-start {FIRST_TIMED_STEP - 1} --profile-step-end {FIRST_TIMED_STEP}"
        profile = f"--profile --use-pytorch-profiler --profile-ranks 0 --tensorboard-dir {traces} {window}"
        more = f"{VARIANTS[variant]} {PRECISIONS[precision]} {flags} --train-iters {FIRST_TIMED_STEP} {profile}"
        command, log, seconds, code = launch(slice_name, more, gpus)
        trace = Path(traces) / "profile" / "rank-0.json"
        events = read_trace(trace) if code == 0 else []
    table = kernel_table(events, num_steps=1)
    found = bool(table["kernels"])
    print(f"{slice_name} {variant}: exit code {code}, {seconds:.0f} s")
    print("\n".join(lines(table)) if found else log[-3000:], flush=True)
    record = {
        "slice": slice_name,
        "variant": variant,
        "precision": precision,
        "gpus": gpus,
        "command": shlex.join(command),
        **table,
    }
    name = "-".join(["kernels", slice_name, variant, *([precision] if precision != BASELINE else [])])
    write_result(folder / f"{name}.json", record)
    return found


def measure(slice_name: str, variant: str, precision: str, flags: str, gpus: int) -> dict[str, Any]:
    """Run one row; its figures, or the end of its log if it failed."""
    command, log, seconds, code = launch(slice_name, f"{VARIANTS[variant]} {PRECISIONS[precision]} {flags}", gpus)
    row: dict[str, Any] = {"slice": slice_name, "precision": precision, "variant": variant, "flags": flags}
    row |= {"gpus": gpus, "commit": commit()[0], "command": shlex.join(command), "seconds": seconds, "exit_code": code}
    if code == 0:
        return row | read_row(log)
    print(log[-3000:])
    return row | {"verdict": f"exit code {code}", "log": log[-3000:]}


def rows_of(*files: Path) -> list[dict[str, Any]]:
    """The rows of the first of `files` that exists, each with its commit and flags."""
    record = next((json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()), None)
    if record is None:
        return []
    return [{"commit": record["commit"], "flags": "", **row} for row in record["results"]["rows"]]


def main(argv: list[str] | None = None) -> int:
    """Run the rows; returns 1 if one failed or does not count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", choices=SLICES, required=True)
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=[REFERENCE, "graph"])
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=[BASELINE])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--flags", default="", help="added to every row")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of one step of each row instead")
    parser.add_argument("--folder", type=Path, default=EVIDENCE)
    args = parser.parse_args(argv)
    if args.kernels:
        pairs = itertools.product(args.variants, args.precisions)
        listed = [list_kernels(args.slice, *pair, args.flags, args.gpus, args.folder) for pair in pairs]
        return 0 if all(listed) else 1
    name = f"step-{args.slice}-{args.gpus}gpu.json"
    rows, is_good = rows_of(args.folder / name, EVIDENCE / name), True
    for kind in itertools.product(args.variants, args.precisions):
        row = measure(args.slice, *kind, args.flags, args.gpus)
        rows = [old for old in rows if (old["variant"], old["precision"], old["flags"]) != (*kind, args.flags)]
        if row["exit_code"] == 0:
            row["verdict"] = judge(row, reference_of(row, rows))
        rows.append(row)
        is_good &= row["verdict"].startswith("counts")
        shown = ("step_ms", "tflops_per_gpu", "peak_allocated_mb", "peak_reserved_mb", "seconds", "verdict")
        figures = ", ".join(f"{key} {row[key]}" for key in shown if key in row)
        print(f"{args.slice} {' '.join(kind)}: {figures}", flush=True)
        write_result(args.folder / name, {"rows": rows})
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
