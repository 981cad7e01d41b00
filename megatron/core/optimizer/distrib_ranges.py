"""Which elements of which parameter a rank updates when the optimizer is sharded. Pure arithmetic.

A bucket of R ranks is cut into R equal shards, wherever parameters begin or end:

    bucket     [ a a a a a a . | b b . | c c c c c c c c c . . ]        . padding
    shard        0 0 0 0 1 1 1   1 2 2   2 2 3 3 3 3 ...

so a parameter may lie in several shards, and a shard holds parts of several parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.distributed.param_layout import shard_range


@dataclass(frozen=True)
class Part:
    """The elements of one parameter that lie in one shard."""

    number: int
    """of the parameter in the bucket"""
    begin: int
    """first element, counted in the flattened parameter"""
    end: int
    """the one behind the last element"""
    position: int
    """where the part begins in the shard"""


def parts_of_shard(
    offsets: Sequence[int], numels: Sequence[int], num_elements: int, rank: int, num_shards: int
) -> list[Part]:
    """The parts in the shard of `rank`, none of them empty.

    Parameter i of the bucket of `num_elements` has `numels[i]` elements and begins at `offsets[i]`.
    """
    shard_begin, shard_end = shard_range(num_elements, rank, num_shards)
    parts = []
    for number, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        begin, end = max(shard_begin, offset), min(shard_end, offset + numel)
        if begin < end:
            parts.append(Part(number, begin - offset, end - offset, begin - shard_begin))
    return parts
