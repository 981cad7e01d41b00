"""Runs functional test cases and compares them with their golden values.

    python tests/functional_tests/run.py                      all cases
    python tests/functional_tests/run.py gpt/dense_fp32       one case
    python tests/functional_tests/run.py --record CASE...     write golden values (say why in the commit)

Exit code 0 if all pass, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.functional_tests.cases import CHECKPOINTS, Case, find_cases, launch, rewind
from tests.functional_tests.golden import (
    collect,
    compare,
    compare_ends,
    find_golden,
    fingerprint,
    golden_path,
    write_golden,
)
from tools.run_metrics import Metrics, read_golden


def run_case(case: Case, work: Path, is_recording: bool = False) -> list[str]:
    """Launch a case and compare it, or record it; returns what does not fit."""
    metrics = collect(launch(case, work), case.metrics, work / "tensorboard")
    problems = resume_case(case, work, metrics) if case.test_type == "ckpt-resume" else []
    if problems:
        return problems
    if is_recording:
        write_golden(golden_path(case.folder), metrics)
        return []
    return compare_with_golden(case, metrics)


def compare_with_golden(case: Case, metrics: Metrics) -> list[str]:
    """Compare what a case gave with its golden values; returns what does not fit."""
    path = find_golden(case.folder)
    is_same = json.loads(path.read_text(encoding="utf-8"))["fingerprint"] == fingerprint()
    if case.test_type == "curve" and not is_same:
        return compare_ends(read_golden(path), metrics)
    return compare(read_golden(path), metrics, is_same)


def resume_case(case: Case, work: Path, straight: Metrics) -> list[str]:
    """Run the second half again from the save in the middle; it must equal the straight run in every digit."""
    rewind(work / CHECKPOINTS, case.half)
    resumed = collect(launch(case, work, is_second=True), case.metrics)
    second_half = {
        name: {step: value for step, value in series.items() if step > case.half} for name, series in straight.items()
    }
    return [f"resumed run: {problem}" for problem in compare(second_half, resumed, is_same_fingerprint=True)]


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="<model>/<case>; none given: all")
    parser.add_argument("--record", action="store_true", help="write golden values instead of comparing")
    parser.add_argument("--work", type=Path, default=None, help="folder of the runs (default: a temporary one)")
    args = parser.parse_args(argv)
    work = args.work or Path(tempfile.mkdtemp(prefix="functional-"))
    num_failed = 0
    for case in find_cases(args.cases):
        problems = run_case(case, work / case.name.replace("/", "-"), args.record)
        num_failed += bool(problems)
        print(f"{'FAILED' if problems else 'ok    '} {case.name}", *problems, sep="\n    ", flush=True)
    print(f"runs: {work}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
