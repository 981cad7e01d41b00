"""The rules, one function each: pure functions of clocks and of what was done to a storage so far.

read      behind the last write, on whatever stream that was
write     behind the last write and every read since
free      its owner stream is behind every use on other streams; a release (resize to nothing) is a free
reuse     what `free` would have demanded, when somebody else gets the block
release   nothing uses the storage afterwards
event     an event belongs to one stream
owner     memory that lives longer than a stage is allocated on compute
wgrad     a deferred weight gradient runs on the stream on which its stage put it off
leak      what a backward stage lets go of it has used; nothing lies unused through a whole step
join      at the end of a step compute is behind every other stream of the step
"""

import enum
from dataclasses import dataclass, field

import torch

from megatron.core.stream_check.allocator import Block
from megatron.core.stream_check.clocks import Clocks, Operation, Stream
from megatron.core.stream_check.regions import Region, Regions


class Kind(enum.Enum):
    """What is wrong."""

    READ = "read without order"
    WRITE = "write without order"
    FREE = "freed before its last use"
    REUSE = "memory reused before its last use"
    RELEASED = "used after its release"
    EVENT = "event of two streams"
    OWNER = "allocated on the wrong stream"
    WGRAD = "weight gradient outside its stage's stream"
    LEAK = "kept after its last use"
    UNJOINED = "stream not joined"
    UNWAITED = "collective never waited for"
    COLLECTIVES = "collectives differ between ranks"


@dataclass(frozen=True)
class Finding:
    """One broken rule."""

    kind: Kind
    tensor: str
    """which tensor, stream or group"""
    first: Operation | None = None
    """the operation that should have finished before"""
    then: Operation | None = None
    """the one that does not wait for it"""
    remedy: str = ""

    def key(self) -> tuple[object, ...]:
        """Equal for findings of the same two source lines: one of them is enough."""
        ends = (self.first, self.then)
        return self.kind, *((op.site, op.stream) if op else None for op in ends), "" if any(ends) else self.tensor


@dataclass(eq=False, slots=True)
class StorageUses:
    """What happened to one storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """of the tensor that was first seen with it"""
    num_bytes: int
    name: str = ""
    """what `StreamRecorder.name` was told, for tensors that outlive a step"""
    owner: Stream | None = None
    """the stream it was allocated on; None if it is older than the recording"""
    block: Block | None = None
    allocation: Operation | None = None
    regions: Regions = field(default_factory=lambda: [Region()])
    others: dict[Stream, Operation] = field(default_factory=dict)
    """the last use by each stream but the owner, writes included"""
    release: Operation | None = None
    step_allocated: int = 0
    """0 if it is older than the recording"""
    step_used: int = 0

    def __str__(self) -> str:
        made = f" of {self.allocation.name}" if self.allocation and not self.name else ""
        return f"{self.name or 'tensor'} {str(self.dtype).removeprefix('torch.')} {list(self.shape)}{made}"


def name_of(stream: Stream) -> str:
    """The stream as text: roles print as their value."""
    return str(stream.value) if isinstance(stream, enum.Enum) else str(stream)


def unordered_before_read(regions: Regions, stream: Stream, clocks: Clocks) -> Operation | None:
    """The write (or allocation) that a read of these regions on `stream` does not wait for."""
    writes = (region.last_write for region in regions)
    return next((op for op in writes if op is not None and not clocks.is_ordered(op, stream)), None)


def unordered_before_write(regions: Regions, stream: Stream, clocks: Clocks) -> Operation | None:
    """The use that a write of these regions on `stream` does not wait for."""
    for region in regions:
        for read in region.reads.values():
            if not clocks.is_ordered(read, stream):
                return read
    return unordered_before_read(regions, stream, clocks)


def unordered_before_free(uses: StorageUses, clocks: Clocks) -> list[Operation]:
    """The uses that the owner of the memory is not behind."""
    if uses.owner is None or not uses.others:
        return []
    return [op for op in uses.others.values() if not clocks.is_ordered(op, uses.owner)]


def note_use(uses: StorageUses, operation: Operation) -> None:
    """Remember who else than the owner used the storage last."""
    if operation.stream != uses.owner:
        uses.others[operation.stream] = operation


def is_kept_in_vain(uses: StorageUses, stage: str) -> bool:
    """True if the backward `stage` (labelled B or W and a name) lets go of rows it did not use; a vector may stay."""
    if len(uses.shape) < 2:
        return False
    kind, _, name = stage.partition(" ")
    reads = [operation for region in uses.regions for operation in region.reads.values()]
    last = [operation.stage for operation in (*reads, *uses.others.values())]
    return kind in ("B", "W") and f"B {name}" not in last and f"W {name}" not in last


def is_leak(uses: StorageUses, step: int) -> bool:
    """True if a step allocated it and the whole step that ends now, a later one, did not use it."""
    return 0 < uses.step_allocated < step and uses.step_used < step
