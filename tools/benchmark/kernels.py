"""Where a step's time goes on a GPU: kernels by name, from a trace of --profile --use-pytorch-profiler.

    python tools/benchmark/kernels.py rank-0.json --steps 1       a table of the 40 that take longest
    python tools/benchmark/step.py --slice A --kernels            runs a slice for it

Copies and fills of the driver count as kernels. A kernel's time is the sum of its durations, so that kernels beside
each other count twice; `busy` is the union of them, `span` the time from the first to the last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.pipeline_parallel.overlap.meter import union

CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN = 40
NAME_WIDTH = 110


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def kernel_table(events: Sequence[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Milliseconds, calls and share of every kernel for one step, longest first; and the sums over all of them."""
    times_us: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    spans = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in CATEGORIES:
            times_us[event["name"]] += event["dur"]
            calls[event["name"]] += 1
            spans.append((event["ts"], event["ts"] + event["dur"]))
    total_us = sum(times_us.values())
    rows = [
        {
            "name": name,
            "ms": times_us[name] / 1000 / num_steps,
            "share": times_us[name] / total_us,
            "calls": calls[name] / num_steps,
        }
        for name in sorted(times_us, key=lambda name: -times_us[name])
    ]
    busy_us = sum(end - begin for begin, end in union(spans))
    span_us = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0
    return {
        "steps": num_steps,
        "sum_ms": total_us / 1000 / num_steps,
        "busy_ms": busy_us / 1000 / num_steps,
        "span_ms": span_us / 1000 / num_steps,
        "calls": sum(calls.values()) / num_steps,
        "kernels": rows,
    }


def lines(table: dict[str, Any]) -> Iterator[str]:
    """The table as text."""
    totals = ", ".join(f"{key} {table[key]:.1f}" for key in ("sum_ms", "busy_ms", "span_ms", "calls"))
    yield f"one step: {totals}"
    yield f"{'ms':>9} {'share':>6} {'calls':>8}  kernel"
    for row in table["kernels"][:SHOWN]:
        yield f"{row['ms']:>9.3f} {row['share']:>6.1%} {row['calls']:>8.1f}  {row['name'][:NAME_WIDTH]}"
    rest = table["kernels"][SHOWN:]
    if rest:
        yield f"{sum(row['ms'] for row in rest):>9.3f} {sum(row['share'] for row in rest):>6.1%}  {len(rest)} others"


def main(argv: list[str] | None = None) -> int:
    """Print the table of a trace; returns 1 if there is no kernel in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=1, help="steps that the trace holds (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        events = read_trace(args.trace)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{args.trace}: not a readable trace of --profile ({type(error).__name__}: {error})", file=sys.stderr)
        return 2
    table = kernel_table(events, args.steps)
    print("\n".join(lines(table)))
    return 0 if table["kernels"] else 1


if __name__ == "__main__":
    sys.exit(main())
