"""How much of the communication stream's time passes while the compute stream is at work.

A meter watches `core/streams` and puts a timed event at each border of a stage, behind what the stage waits for. After
the step the spans of both streams are known on the device's own clock:

    compute   |=====|  |==========|      |====|
    comm         |~~~~~~~|     |~~~~~~~~|            hidden: the part of ~ under =, as a share of ~

Nothing is known, and no share is returned, on a CPU, under a graph capture and in a step without communication.
"""

from collections.abc import Iterable

import torch

from megatron.core import streams
from megatron.core.streams import Event, Role

Span = tuple[float, float]


class OverlapMeter:
    """An observer of streams that measures one step at a time."""

    def __init__(self) -> None:
        self._open: tuple[Role, torch.cuda.Event] | None = None
        self._closed: dict[Role, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {role: [] for role in Role}

    def on_switch(self, role: Role, label: str) -> None:
        """A stage ends; with a label that names a pass another one begins on `role`."""
        if self._open is not None:
            before, start = self._open
            end = _mark(before)
            if end is not None:
                self._closed[before].append((start, end))
        start = _mark(role) if label[:2] in ("F ", "B ", "W ") else None
        self._open = None if start is None else (role, start)

    def on_record(self, event: Event) -> None:
        """Nothing to measure."""

    def on_wait(self, role: Role, event: Event) -> None:
        """The stage begins behind what it waits for."""
        start = _mark(role) if self._open is not None else None
        if start is not None:
            self._open = (role, start)

    def on_hold(self, tensor: torch.Tensor, owner: Role, user: Role) -> None:
        """Nothing to measure about `tensor` [...]."""

    def on_retire(self, tensor: torch.Tensor, owner: Role, user: Role) -> None:
        """Nothing to measure about `tensor` [...]."""

    def on_release(self, tensor: torch.Tensor) -> None:
        """Nothing to measure about `tensor` [...]."""

    def on_put_off(self, work: object) -> None:
        """Nothing to measure."""

    def on_take_up(self, work: object) -> None:
        """Nothing to measure."""

    def on_access(self, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Nothing to measure about `reads` and `writes` [...]."""

    def take_share(self) -> float | None:
        """Return the hidden share of the step that ended, and begin anew. Host: waits for the device."""
        closed, self._closed, self._open = self._closed, {role: [] for role in Role}, None
        if not closed[Role.COMM]:
            return None
        origin = closed[Role.COMM][0][0]
        torch.cuda.synchronize()
        spans = {
            role: [(origin.elapsed_time(start), origin.elapsed_time(end)) for start, end in events]
            for role, events in closed.items()
        }
        return hidden_share(spans[Role.COMM], spans[Role.COMPUTE])


def _mark(role: Role) -> torch.cuda.Event | None:
    """A timed event on the stream of a role; None where there is no clock."""
    stream = streams.native(role)
    if stream is None or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def hidden_share(communication: Iterable[Span], compute: Iterable[Span]) -> float | None:
    """Share of the time of `communication` that lies in the union of `compute`; None if there is none."""
    wanted, busy = union(communication), union(compute)
    total = sum(end - start for start, end in wanted)
    hidden = sum(max(0.0, min(end, e) - max(start, s)) for start, end in wanted for s, e in busy)
    return hidden / total if total > 0 else None


def union(spans: Iterable[Span]) -> list[Span]:
    """Join spans where they meet."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
