#!/usr/bin/env python3
"""Shows how much communication runs beside compute: profiles steps of a run, or reads traces.

    torchrun --nproc-per-node 2 tools/profile_overlap.py <flags of pretrain_gpt.py>    profiles steps 4 and 5
    python tools/profile_overlap.py rank-0.json rank-1.json                            reads traces of --profile

For each kind of communication: its time per trace, and the share of it during which a compute kernel ran on the same
GPU. Times are unions of intervals, so that nothing counts twice. In a profiled run the stages are named in the trace:
what the host launches in a `dispatch` or a `combine` is of that kind, whatever the kernels are, and whichever thread
launches it (backward has one of its own). Elsewhere, in a replayed graph, and in traces of other runs, kernels are
known by their names; `send and receive` are then messages between stages and exchanges alike.
"""

import json
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core import env, streams
from megatron.core.pipeline_parallel.overlap.meter import Span, hidden_share, union

FIRST_STEP, LAST_STEP = 3, 5
STAGES = ("dispatch", "combine")
PASSES = ("F", "B", "W")
"""What a stage's label begins with."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
NCCL_KINDS = {
    "reduce-scatter": ("ReduceScatter",),
    "all-gather": ("AllGather",),
    "all-reduce": ("AllReduce",),
    "send and receive": ("SendRecv", "AllToAll"),
}
SYMMETRIC_KERNELS = tuple(f"{part}_kernel" for part in ["push", "wait", "arrange", "expand", "zero", "reduce", "add"])
"""Whole names: torch has a `reduce_kernel` too, with arguments of its template."""


def kind_of(name: str, stage: str) -> str | None:
    """Kind of communication of a kernel launched in `stage`; None for compute."""
    if stage in STAGES:
        return stage
    if name in SYMMETRIC_KERNELS:
        return "symmetric memory"
    if "nccl" not in name.lower():
        return None
    return next((kind for kind, parts in NCCL_KINDS.items() if any(part in name for part in parts)), None)


def read_spans(events: Sequence[dict[str, Any]]) -> dict[str | None, list[Span]]:
    """Spans of all device kernels in microseconds, by kind; None holds compute."""
    stages, launches = _stages(events), _launch_times(events)
    spans: dict[str | None, list[Span]] = {None: []}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            launch = launches.get(event.get("args", {}).get("correlation"))
            kind = kind_of(event["name"], _stage_at(launch, stages))
            spans.setdefault(kind, []).append((event["ts"], event["ts"] + event["dur"]))
    return spans


def _stages(events: Sequence[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """(begin, end, name) of each stage on the host, in order; one at a time is open."""
    found = []
    for event in events:
        words = str(event.get("name")).split()
        if event.get("ph") == "X" and event.get("cat") == "user_annotation" and words and words[0] in PASSES:
            found.append((event["ts"], event["ts"] + event["dur"], words[-1]))
    return sorted(found)


def _launch_times(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    """When the host launched a kernel, by the number that the two events share."""
    calls = (event for event in events if event.get("ph") == "X" and event.get("cat") in LAUNCHES)
    return {call["args"]["correlation"]: call["ts"] for call in calls if "correlation" in call.get("args", {})}


def _stage_at(time: float | None, stages: Sequence[tuple[float, float, str]]) -> str:
    """The stage that is open at a time of the host; empty if there is none."""
    if time is None:
        return ""
    before = bisect_right(stages, (time, float("inf"), ""))
    return stages[before - 1][2] if before and time <= stages[before - 1][1] else ""


def report(spans: dict[str | None, list[Span]]) -> Iterator[str]:
    """One line per kind: time, hidden share; then the whole."""
    yield f"{'communication':<20}{'ms':>10}{'hidden':>10}"
    kinds = sorted(kind for kind in spans if kind is not None)
    everything = [span for kind in kinds for span in spans[kind]]
    for kind, chosen in [*((kind, spans[kind]) for kind in kinds), ("all", everything)]:
        share = hidden_share(chosen, spans[None])
        time_ms = sum(end - start for start, end in union(chosen)) / 1000.0
        yield f"{kind:<20}{time_ms:>10.3f}" + (f"{share:>9.1%}" if share is not None else f"{'-':>9}")


class StageRanges:
    """Observer of streams that names the stages in a profiler's trace."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def on_switch(self, role: streams.Role, label: str) -> None:
        """Close the range of the stage that ends, open one for the next."""
        self._open.close()
        if label:
            self._open.enter_context(torch.profiler.record_function(label))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def profile_run(flags: Sequence[str]) -> Path:
    """Train with these flags under the profiler; returns this rank's trace."""
    import pretrain_gpt

    folder = Path("runs/profile_overlap")
    window = ["--profile-step-start", str(FIRST_STEP), "--profile-step-end", str(LAST_STEP)]
    more = ["--profile", "--use-pytorch-profiler", "--tensorboard-dir", str(folder), "--train-iters", str(LAST_STEP)]
    kept = [flag for flag in flags if flag != "--log-overlap"]
    sys.argv = ["pretrain_gpt.py", *kept, *more, *window]
    streams.set_observer(StageRanges())  # the one observer: --log-overlap would take its place
    status = pretrain_gpt.main()
    if status:
        sys.exit(status)
    return folder / "profile" / f"rank-{env.rank()}.json"


def main(arguments: Sequence[str]) -> int:
    """Print a report for each trace."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(__doc__ or "")
        return 0
    paths = [Path(argument) for argument in arguments]
    if not all(path.suffix == ".json" for path in paths):
        paths = [profile_run(arguments)]
    for path in paths:
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.stderr.write(f"{path}: not a readable trace of --profile ({type(error).__name__}: {error})\n")
            return 2
        lines = report(read_spans(events))
        sys.stdout.write("\n".join([f"{path}", *lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
