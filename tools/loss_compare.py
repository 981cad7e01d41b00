"""Compares a metric of two runs step by step: the proof that a change of code left the numbers alone.

    python tools/loss_compare.py before.log after.log                     equal to the last printed digit
    python tools/loss_compare.py cpu.log gpu.log --rtol 1e-4              within a relative bound
    python tools/loss_compare.py before.log after.log --state-hash        the state hashes of every line

Exit code 0 if they agree, 1 if not or if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.run_metrics import Series, parse_state_hashes, read_run


def relative_differences(first: Series, second: Series) -> dict[int, float]:
    """Return |a - b| / |a| per common iteration; a value that is not finite on either side differs by infinity."""
    differences = {}
    for step in sorted(set(first) & set(second)):
        a, b = first[step], second[step]
        if not (math.isfinite(a) and math.isfinite(b)):
            differences[step] = math.inf
        else:
            differences[step] = 0.0 if a == b else abs(a - b) / max(abs(a), 1e-30)
    return differences


def unequal_steps(first: Mapping[int, Any], second: Mapping[int, Any]) -> list[int]:
    """Return the iterations that only one side has or at which the two differ."""
    return [step for step in sorted(set(first) | set(second)) if first.get(step) != second.get(step)]


def compare_hashes(first: Path, second: Path) -> int:
    """Compare the state hashes of two logs; returns the exit code."""
    hashes = [parse_state_hashes(path.read_text(encoding="utf-8", errors="replace")) for path in (first, second)]
    if not all(hashes):
        print("no state hashes: run with --log-state-hash")
        return 1
    different = unequal_steps(*hashes)
    print(f"state hash: {len(hashes[0])} lines, different at {different or 'none'}")
    return 1 if different else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path, help="two logs, TensorBoard folders or golden files")
    parser.add_argument("--metric", default="lm loss", help="what to compare (default: %(default)s)")
    parser.add_argument("--rtol", type=float, default=0.0, help="largest relative difference (default: %(default)s)")
    parser.add_argument("--state-hash", action="store_true", help="compare state hashes instead")
    args = parser.parse_args(argv)
    missing = [str(path) for path in args.runs if not path.exists()]
    if missing:
        print(f"{', '.join(missing)}: no such run; name logs, TensorBoard folders or golden files", file=sys.stderr)
        return 1
    if args.state_hash:
        return compare_hashes(*args.runs)
    first, second = (read_run(path).get(args.metric, {}) for path in args.runs)
    differences = relative_differences(first, second)
    if not differences or set(first) != set(second):
        print(f"{args.metric}: {len(first)} and {len(second)} steps, {len(differences)} in common: nothing is proved")
        return 1
    worst = max(differences, key=lambda step: differences[step])
    print(f"{args.metric}: {len(differences)} steps, largest relative difference {differences[worst]:.3e} at {worst}")
    return 0 if differences[worst] <= args.rtol else 1


if __name__ == "__main__":
    sys.exit(main())
