"""Vector clocks: what has certainly finished before a stream goes on.

Every stream counts its own operations. Its clock holds, for each stream, the number of that stream's operations that
it is behind: an event carries a copy of the clock of the stream that records it, and a stream that waits for the event
takes the larger entry of the two. Operation n of stream A is before what B does next if B's clock has at least n for A.

    A   1 --- 2 --- record          clock of A in the event: {A: 2}
                       \\
    B        1 -------- wait --- 2  behind operations 1 and 2 of A, not behind 3

Only events order streams. A host that has read a value orders nothing here, although it does so on a device: a captured
step has no host in it.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from megatron.core.stream_check.sites import Site

Stream = Hashable
Snapshot = Mapping[Stream, int]


@dataclass(slots=True, eq=False)
class Operation:
    """One entry of a stream: a kernel, a copy, a collective, an allocation."""

    stream: Stream
    """where it runs"""
    tick: int
    """its number on that stream, from 1"""
    name: str
    """what it is: aten.mm, c10d.allreduce_, allocation, ..."""
    stage: str
    """the stage and microbatch that issued it, or an empty string"""
    site: Site = field(default=(), repr=False)
    """the callers of ours"""


class Clocks:
    """The clocks of all streams of a process."""

    def __init__(self) -> None:
        self._clocks: dict[Stream, dict[Stream, int]] = {}

    @property
    def streams(self) -> list[Stream]:
        """Every stream that did something or waited, in the order of first use."""
        return list(self._clocks)

    def of(self, stream: Stream) -> dict[Stream, int]:
        """The clock of `stream` as it stands; entry `stream` is the number of operations it has issued."""
        clock = self._clocks.get(stream)
        if clock is None:
            clock = self._clocks[stream] = {stream: 0}
        return clock

    def advance(self, stream: Stream) -> int:
        """Count one operation of `stream` and return its number."""
        clock = self.of(stream)
        clock[stream] += 1
        return clock[stream]

    def snapshot(self, stream: Stream) -> Snapshot:
        """What an event recorded on `stream` now stands for."""
        return dict(self.of(stream))

    def join(self, stream: Stream, snapshot: Snapshot) -> None:
        """Make `stream` wait for an event."""
        clock = self.of(stream)
        for other, tick in snapshot.items():
            if clock.get(other, 0) < tick:
                clock[other] = tick

    def is_ordered(self, before: Operation, stream: Stream) -> bool:
        """True if what `stream` does next is behind `before`."""
        return before.stream == stream or self.of(stream).get(before.stream, 0) >= before.tick

    def is_behind(self, stream: Stream, other: Stream) -> bool:
        """True if `stream` has waited for everything that `other` has issued."""
        return self.of(stream).get(other, 0) >= self.of(other)[other]
