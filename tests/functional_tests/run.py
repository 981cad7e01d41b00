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

from tests.functional_tests.cases import Case, find_cases, launch
from tests.functional_tests.golden import collect, compare, find_golden, fingerprint, golden_path, write_golden
from tools.run_metrics import read_golden


def run_case(case: Case, work: Path, is_recording: bool = False) -> list[str]:
    """Launch a case and compare it, or record it; returns what does not fit."""
    metrics = collect(launch(case, work), case.metrics)
    if is_recording:
        write_golden(golden_path(case.folder), metrics)
        return []
    path = find_golden(case.folder)
    is_same = json.loads(path.read_text(encoding="utf-8"))["fingerprint"] == fingerprint()
    return compare(read_golden(path), metrics, is_same)


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
