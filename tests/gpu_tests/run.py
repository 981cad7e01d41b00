"""Runs the GPU tests in parts, the most valuable first: what `make test-gpu` calls.

    python3 tests/gpu_tests/run.py                   all parts that this machine's GPUs allow
    python3 tests/gpu_tests/run.py --only loss-ep2   one part, or several; this also resumes after the time ran out

Every part is a pytest run of its own with a time limit. A part that hangs is told to print the stack of every thread
and is killed. After each part its record is written to docs/evidence/gpu-<part>.json, and copied to $OUT if that is
set. No part is begun that could outlast the budget (9 minutes), and what was left out is named. Needs torch, pytest,
PyYAML and tqdm; the repository need not be installed. Exit code 0 if all parts passed, 1 if not, 3 if some were left
out for time.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGET_SECONDS = 540
GRACE_SECONDS = 10
LEFT_OUT = 3


@dataclass(frozen=True)
class Part:
    """One pytest selection."""

    name: str
    selection: tuple[str, ...]
    limit_seconds: int
    num_gpus: int = 1


LAUNCHES = "tests/gpu_tests/test_launches.py"
WGRAD = "tests/gpu_tests/test_wgrad.py"
RING_WGRAD = "tests/gpu_tests/test_ring_wgrad.py"
TWO_GPUS = "tests/gpu_tests/test_two_gpus.py"
PIPELINE = "tests/gpu_tests/test_pipeline.py"
CP_BLOCKS = "tests/gpu_tests/test_context_parallel.py"
SYMM_MEM = "tests/gpu_tests/test_symm_mem.py"
SYMM_MEM_RANKS = "tests/gpu_tests/test_symm_mem_ranks.py"
SYMM_MEM_GPUS = "tests/gpu_tests/test_symm_mem_two_gpus.py"
PERMUTE = "tests/gpu_tests/test_permute.py"
ELEMENTWISE = "tests/gpu_tests/test_elementwise.py"
FP8 = "tests/gpu_tests/test_fp8.py"
FP8_STEPS = "tests/gpu_tests/test_fp8_steps.py"
FP8_CURVES = "tests/gpu_tests/test_fp8_curves.py"
DISPATCH = "tests/gpu_tests/test_dispatch_benchmark.py"
OVERLAP = "tests/gpu_tests/test_overlap.py"
OVERLAP_RUNS = "tests/gpu_tests/test_overlap_runs.py"
OVERLAP_RANKS = "tests/gpu_tests/test_overlap_ranks.py"
OVERLAP_FIGURES = "tests/gpu_tests/test_overlap_figures.py"
STREAM_CHECK = "tests/gpu_tests/test_stream_check.py"
GRAPH = "tests/gpu_tests/test_full_iteration_graph.py"
GRAPH_FORMS = "tests/gpu_tests/test_graph_forms.py"
GRAPH_RANKS = "tests/gpu_tests/test_graph_ranks.py"
GRAPH_EXIT = "tests/gpu_tests/test_graph_exit.py"
GRAPH_FAULTS = "tests/gpu_tests/test_graph_faults.py"
FIGURES = "tests/gpu_tests/test_graph_figures.py"
STEP = "tests/gpu_tests/test_step_benchmark.py"
ENGINE = "tests/gpu_tests/test_transformer_engine.py"
FUSED_LOSS = "tests/gpu_tests/test_fused_loss.py"
FUSED_ROUTER = "tests/gpu_tests/test_fused_router.py"
FUSED_ADAM = "tests/gpu_tests/test_fused_adam.py"
FUSED_NORM = "tests/gpu_tests/test_fused_norm.py"
OWN_PARTS = (
    STREAM_CHECK,
    OVERLAP,
    OVERLAP_RUNS,
    OVERLAP_RANKS,
    OVERLAP_FIGURES,
    LAUNCHES,
    WGRAD,
    RING_WGRAD,
    TWO_GPUS,
    PIPELINE,
    CP_BLOCKS,
    SYMM_MEM,
    SYMM_MEM_RANKS,
    SYMM_MEM_GPUS,
    DISPATCH,
    PERMUTE,
    ELEMENTWISE,
    GRAPH,
    GRAPH_FAULTS,
    GRAPH_EXIT,
    GRAPH_RANKS,
    GRAPH_FORMS,
    FIGURES,
    STEP,
    FUSED_LOSS,
    FUSED_ROUTER,
    FUSED_NORM,
    FUSED_ADAM,
    FP8,
    FP8_STEPS,
    FP8_CURVES,
    ENGINE,
)
"""Files that `unit` leaves to parts of their own."""
PARTS = (
    Part("loss", (f"{LAUNCHES}::test_loss_curves_of_cpu_and_cuda_agree",), 150),
    Part("loss-ep2", (f"{LAUNCHES}::test_loss_curves_agree_on_two_gpus",), 150, num_gpus=2),
    Part("bf16", (f"{LAUNCHES}::test_bf16_mixture_learns_with_grouped_experts",), 120),
    Part("repeatable", (f"{LAUNCHES}::test_deterministic_runs_are_bitwise_equal",), 120),
    Part("resume", (f"{LAUNCHES}::test_resume_with_dropout_is_bitwise_on_a_gpu",), 120),
    Part("overlap", (OVERLAP, "-k", "not two_gpus"), 120),
    Part("overlap-2", (OVERLAP, "-k", "two_gpus"), 240, num_gpus=2),
    Part("overlap-share", (OVERLAP_RUNS, "-k", "share or profiler or silent"), 60),
    Part("overlap-graph", (OVERLAP_RUNS, "-k", "bits"), 120),
    Part("overlap-ranks", (OVERLAP_RANKS, "-k", "alltoall or last_weight"), 150),
    Part("overlap-ranks-more", (OVERLAP_RANKS, "-k", "flex or profile or silent"), 150),
    Part("overlap-figures", (f"{OVERLAP_FIGURES}::test_eager_ways_of_slice_a",), 120),
    Part("overlap-captured", (f"{OVERLAP_FIGURES}::test_captured_ways_of_slice_a",), 85),
    Part("stream-check", (STREAM_CHECK,), 90),
    Part("wgrad", (WGRAD, "--deselect", f"{WGRAD}::test_benchmark_sweeps_all_shapes"), 120),
    Part("wgrad-sweep", (f"{WGRAD}::test_benchmark_sweeps_all_shapes",), 120),
    Part("wgrad-ring", (RING_WGRAD, "-k", "not swept"), 90),
    Part("wgrad-cuts", (RING_WGRAD, "-k", "swept"), 120),
    Part("permute", (PERMUTE, "-k", "not test_layout and not test_slots and not bandwidth"), 120),
    Part("permute-speed", (PERMUTE, "-k", "bandwidth"), 60),
    Part("permute-layout", (PERMUTE, "-k", "test_layout or test_slots"), 60),
    Part("elementwise", (ELEMENTWISE, "-k", "not swept and not bandwidth"), 60),
    Part("elementwise-speed", (ELEMENTWISE, "-k", "bandwidth"), 60),
    Part("elementwise-sweep", (ELEMENTWISE, "-k", "swept"), 90),
    Part("fp8", (FP8, "-k", "not benchmark"), 120),
    Part("fp8-memory", (FP8_STEPS, "-k", "in_flight or pool_of"), 60),
    Part("fp8-steps", (FP8_STEPS, "-k", "eager_ones"), 120),
    Part("fp8-curves", (FP8_CURVES,), 90),
    Part("fp8-quantise", (FP8, "-k", "benchmark_times and quantise]"), 60),
    Part("fp8-casts", (FP8, "-k", "benchmark_times and casts"), 60),
    Part("fp8-swiglu", (FP8, "-k", "benchmark_times and swiglu"), 60),
    Part("fp8-few-rows", (FP8, "-k", "for_few_rows"), 60),
    Part("fp8-bits", (FP8, "-k", "have_the_bits or has_the_bits"), 60),
    Part("fp8-swiglu-bits", (FP8, "-k", "equals_two_steps"), 60),
    Part("fp8-speed", (FP8, "-k", "benchmark_prints"), 120),
    Part("fp8-sweep", (FP8, "-k", "benchmark_sweeps and not few"), 120),
    Part("te", (ENGINE, "-k", "not captured and not times and not hiding"), 120),
    Part("te-overlap", (ENGINE, "-k", "times or hiding"), 60),
    Part("te-graph", (ENGINE, "-k", "captured"), 90),
    Part("symm-mem", (SYMM_MEM, "-k", "not rounds and not definition and not fp8"), 120),
    Part("symm-mem-fp8", (SYMM_MEM, "-k", "packed or fp8"), 90),
    Part("symm-mem-cases", (SYMM_MEM, "-k", "definition and not packed"), 120),
    Part("symm-mem-rounds", (SYMM_MEM, "-k", "rounds"), 120),
    Part("dispatch", (f"{DISPATCH}::test_kernels_have_the_bandwidth_of_a_copy",), 90),
    Part("dispatch-sms", (f"{DISPATCH}::test_kernels_are_timed_on_a_part_of_the_device",), 90),
    Part("dispatch-sweep", (f"{DISPATCH}::test_tilings_are_swept",), 120),
    Part("symm-mem-ranks", (SYMM_MEM_RANKS,), 90),
    Part("symm-mem-2", (SYMM_MEM_GPUS,), 120, num_gpus=2),
    Part("dispatch-2", (f"{DISPATCH}::test_operations_are_timed_between_two_gpus",), 120, num_gpus=2),
    Part("pp2", (f"{PIPELINE}::test_peak_memory_is_that_of_the_formula",), 120, num_gpus=2),
    Part("pp-shared", (f"{PIPELINE}::test_peak_memory_of_stages_on_one_gpu_is_that_of_the_formula",), 150),
    Part("pp2-curve", (f"{PIPELINE}::test_pipeline_curve_is_that_of_one_gpu",), 120, num_gpus=2),
    Part("graph", (GRAPH, "-k", "repeatable or equal_hundred and 0.1 and not hybridep"), 120),
    Part("graph-hybridep", (GRAPH, "-k", "equal_hundred and hybridep"), 120),
    Part("graph-faults", (GRAPH_FAULTS,), 120),
    Part("graph-forms", (GRAPH_FORMS,), 120),
    Part("graph-ranks", (GRAPH_RANKS, "-k", "expert or fails"), 120),
    Part("graph-ranks-more", (GRAPH_RANKS, "-k", "stages"), 120),
    Part("graph-ranks-chosen", (GRAPH_RANKS, "-k", "chosen"), 70),
    Part("graph-exit", (GRAPH_EXIT,), 110),
    Part("graph-overflow", (GRAPH, "-k", "overflows_and or overflows_take or skipped or resume"), 120),
    Part("graph-figures", (f"{FIGURES}::test_captured_step_of_slice_a_beside_an_eager_one[4]",), 120),
    Part("graph-figures-1", (f"{FIGURES}::test_captured_step_of_slice_a_beside_an_eager_one[1]",), 120),
    Part("graph-growing", (f"{FIGURES}::test_capture_into_memory_that_grows_in_place",), 90),
    Part("step-A", (f"{STEP}::test_captured_step_is_timed[A]",), 75),
    Part("step-C", (f"{STEP}::test_captured_step_is_timed[C]",), 75),
    Part("fused-loss", (FUSED_LOSS,), 60),
    Part("fused-router", (FUSED_ROUTER,), 60),
    Part("fused-norm", (FUSED_NORM, "-k", "not bandwidth"), 60),
    Part("fused-adam", (FUSED_ADAM, "-k", "not bandwidth"), 60),
    Part("fused-adam-speed", (FUSED_ADAM, "-k", "bandwidth"), 60),
    Part("fused-norm-speed", (FUSED_NORM, "-k", "bandwidth"), 60),
    Part("step-A-kernels", (f"{STEP}::test_kernels_of_a_captured_step_are_listed[A]",), 90),
    Part("step-C-kernels", (f"{STEP}::test_kernels_of_a_captured_step_are_listed[C]",), 90),
    Part("step-A-fp8", (f"{STEP}::test_captured_step_in_fp8_is_timed[A]",), 75),
    Part("step-C-fp8", (f"{STEP}::test_captured_step_in_fp8_is_timed[C]",), 75),
    Part("step-A-fp8-kernels", (f"{STEP}::test_kernels_of_a_captured_step_in_fp8_are_listed[A]",), 90),
    Part("step-C-fp8-kernels", (f"{STEP}::test_kernels_of_a_captured_step_in_fp8_are_listed[C]",), 90),
    Part("step-A-eager", (f"{STEP}::test_row_beside_it_is_timed[A-eager]",), 110),
    Part("step-C-eager", (f"{STEP}::test_row_beside_it_is_timed[C-eager]",), 110),
    Part("step-A-drop-pad", (f"{STEP}::test_row_beside_it_is_timed[A-drop-pad]",), 110),
    Part("step-C-drop-pad", (f"{STEP}::test_row_beside_it_is_timed[C-drop-pad]",), 110),
    Part("step-A-overflow", (f"{STEP}::test_row_beside_it_is_timed[A-overflow]",), 120),
    Part("graph-2", (GRAPH, "-k", "two_gpus or ends_by"), 240, num_gpus=2),
    Part("unit", ("tests/gpu_tests", *(word for path in OWN_PARTS for word in ("--ignore", path))), 240),
    Part("graph-plain", (GRAPH, "-k", "equal_hundred and not 0.1 and not hybridep"), 120),
    Part("cp-blocks", (CP_BLOCKS,), 90),
    Part("zero2", (f"{TWO_GPUS}::test_sharded_optimizer_hides_reduction_and_gather",), 120, num_gpus=2),
    Part("tp2", (f"{TWO_GPUS}::test_tensor_parallel_hides_a_part_of_its_exchanges",), 120, num_gpus=2),
    Part("ep2-1b", (f"{TWO_GPUS}::test_expert_parallel_mixture_hides_reduction_and_gather",), 120, num_gpus=2),
    Part("cp2", (f"{TWO_GPUS}::test_context_parallel_curve_is_that_of_one_gpu",), 120, num_gpus=2),
)


def extend_path() -> str:
    """PYTHONPATH with the repository in front."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_part(part: Part) -> int:
    """Run one part and return pytest's exit code, or 124 after its time limit."""
    words = [sys.executable, "-X", "faulthandler", "-m", "pytest", *part.selection]
    words += ["-m", "gpu", "--evidence", f"gpu-{part.name}", "-o", "addopts=-rA", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": extend_path(), "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=part.limit_seconds)
    except subprocess.TimeoutExpired:
        # The abort signal makes the fault handler of every process of the part print its stacks.
        os.killpg(process.pid, signal.SIGABRT)
        time.sleep(GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 124


def save_record(part: Part) -> None:
    """Copy the record of a part to $OUT."""
    record = ROOT / "docs" / "evidence" / f"gpu-{part.name}.json"
    if "OUT" in os.environ and record.exists():
        shutil.copy(record, os.environ["OUT"])


def count_gpus() -> int:
    """Ask torch in a process of its own, so that this one never holds a GPU."""
    question = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(question, capture_output=True, text=True, check=True, timeout=120).stdout)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--budget", type=int, default=BUDGET_SECONDS, help="seconds in all (default: %(default)s)")
    args = parser.parse_args(argv)
    start, num_gpus = time.monotonic(), count_gpus()
    faulthandler.dump_traceback_later(args.budget + 2 * GRACE_SECONDS, exit=True)
    outcomes: dict[str, str] = {}
    for part in PARTS:
        if args.only and part.name not in args.only:
            continue
        if num_gpus < part.num_gpus:
            outcomes[part.name] = f"skipped: needs {part.num_gpus} GPUs, {num_gpus} are here"
        elif time.monotonic() - start + part.limit_seconds > args.budget:
            outcomes[part.name] = "left out: no time; resume with --only"
        else:
            begin = time.monotonic()
            code = run_part(part)
            save_record(part)
            verdict = {0: "passed", 5: "no tests", 124: "timed out"}.get(code, f"failed ({code})")
            outcomes[part.name] = f"{verdict} in {time.monotonic() - begin:.0f} s"
        print(f"=== {part.name}: {outcomes[part.name]}", flush=True)
    print("\n".join(f"{name:12s} {outcome}" for name, outcome in outcomes.items()))
    if any(outcome.startswith(("failed", "timed out")) for outcome in outcomes.values()):
        return 1
    return LEFT_OUT if any(outcome.startswith("left out") for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
