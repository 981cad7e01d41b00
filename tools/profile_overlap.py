#!/usr/bin/env python3
"""Shows how much communication runs beside compute: profiles steps of a run, or reads traces.

    torchrun --nproc-per-node 2 tools/profile_overlap.py <flags of pretrain_gpt.py>    profiles steps 4 and 5
    python tools/profile_overlap.py rank-0.json rank-1.json                            reads traces of --profile

For each kind of communication: its time per trace, and the share of it during which a compute kernel ran on the same
GPU. Times are unions of intervals, so that nothing counts twice. Point-to-point kernels are told apart by the stage
that launched them; traces from elsewhere call them all `send and receive`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core import env, streams
from megatron.core.pipeline_parallel.overlap.meter import Span, hidden_share, union

FIRST_STEP, LAST_STEP = 3, 5
KINDS = {
    "reduce-scatter": ("ReduceScatter",),
    "all-gather": ("AllGather",),
    "all-reduce": ("AllReduce",),
    "symmetric memory": ("symm_mem", "_push_", "_signal_"),
    "send and receive": ("SendRecv", "AllToAll"),
}
STAGES = ("dispatch", "combine")


def kind_of(name: str, stage: str) -> str | None:
    """Kind of communication of a kernel launched in `stage`; None for compute."""
    for kind, parts in KINDS.items():
        if any(part in name for part in parts) and ("nccl" in name.lower() or kind == "symmetric memory"):
            is_exchange = kind in ("send and receive", "symmetric memory")
            return next((known for known in STAGES if is_exchange and known in stage.split()[-1:]), kind)
    return None


def read_spans(events: Sequence[dict[str, Any]]) -> dict[str | None, list[Span]]:
    """Spans of all device kernels in microseconds, by kind; None holds compute."""
    stages = [event for event in events if event.get("ph") == "X" and event.get("cat") == "gpu_user_annotation"]
    spans: dict[str | None, list[Span]] = {None: []}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            kind = kind_of(event["name"], _stage_around(event, stages))
            spans.setdefault(kind, []).append((event["ts"], event["ts"] + event["dur"]))
    return spans


def _stage_around(kernel: dict[str, Any], stages: Sequence[dict[str, Any]]) -> str:
    """Name of the annotation on the kernel's stream that the kernel lies in; empty if there is none."""
    for stage in stages:
        if stage["tid"] == kernel["tid"] and stage["ts"] <= kernel["ts"] <= stage["ts"] + stage["dur"]:
            return stage["name"]
    return ""


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
    sys.argv = ["pretrain_gpt.py", *flags, *more, *window]
    streams.set_observer(StageRanges())
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
