"""How much of the communication in a torch profiler trace runs beside compute kernels.

share = hidden_share(read_kernels(path), "ReduceScatter")       0.8: four fifths of its time are hidden
"""

import json
from pathlib import Path
from typing import NamedTuple


class Kernel(NamedTuple):
    """One kernel on the device; times in microseconds."""

    name: str
    start: float
    end: float

    @property
    def is_communication(self) -> bool:
        """Whether it is one of NCCL's."""
        return "nccl" in self.name.lower()


def read_kernels(path: Path) -> list[Kernel]:
    """All device kernels of a chrome trace."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Kernel(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") == "kernel"
    ]


def hidden_share(kernels: list[Kernel], part_of_name: str) -> float:
    """Time of the NCCL kernels with this in their name during which a compute kernel runs too, as a share of theirs."""
    chosen = [kernel for kernel in kernels if kernel.is_communication and part_of_name in kernel.name]
    assert chosen, f"no {part_of_name} among {sorted({k.name for k in kernels if k.is_communication})}"
    busy = _union([(kernel.start, kernel.end) for kernel in kernels if not kernel.is_communication])
    hidden = sum(max(0.0, min(end, k.end) - max(start, k.start)) for k in chosen for start, end in busy)
    return hidden / sum(kernel.end - kernel.start for kernel in chosen)


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals joined where they touch."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
