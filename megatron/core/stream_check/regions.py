"""What was done to which bytes of a storage: one bucket of a buffer is reduced while the next one is filled.

    [ region 0 | region 1 |          region 2          ]      in order, without gaps

A storage begins as one region. An access to a part cuts regions at its ends; a write makes one region of what it
covers. A tensor covers what lies between its first and its last element, gaps of a strided view included.
"""

import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from megatron.core.stream_check.clocks import Operation, Stream


@dataclass(eq=False, slots=True)
class Region:
    """Bytes that were used alike. Of each stream the last read is enough: a stream is in order in itself."""

    begin: int = 0
    end: int = sys.maxsize
    last_write: Operation | None = None
    reads: dict[Stream, Operation] = field(default_factory=dict)
    """the last read of each stream since the last write"""


Regions = list[Region]


def touched(regions: Regions, tensor: torch.Tensor) -> slice:
    """Which regions are those of `tensor` [...], after they are cut at its ends."""
    begin, end = covered_bytes(tensor)
    first = _cut(regions, begin) if begin else 0
    is_last = end >= tensor.untyped_storage().nbytes()
    return slice(first, len(regions) if is_last else _cut(regions, end))


def covered_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of `tensor` [...] in its storage, and the byte behind its last."""
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    if tensor.is_contiguous():
        return begin * size, (begin + tensor.numel()) * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (begin + last + 1) * size


def note_read(regions: Regions, chosen: slice, operation: Operation) -> None:
    """Remember a read."""
    for region in regions[chosen]:
        region.reads[operation.stream] = operation


def note_write(regions: Regions, chosen: slice, operation: Operation) -> None:
    """Remember a write; what came before it is behind it, or was reported."""
    first, last = regions[chosen][0], regions[chosen][-1]
    regions[chosen] = [Region(first.begin, last.end, operation)]


def _cut(regions: Regions, at: int) -> int:
    """Number of the region that begins at a byte, which is made to begin there."""
    i = bisect_right(regions, at, key=attrgetter("begin")) - 1
    whole = regions[i]
    if whole.begin == at:
        return i
    regions.insert(i + 1, Region(at, whole.end, whole.last_write, dict(whole.reads)))
    whole.end = at
    return i + 1
