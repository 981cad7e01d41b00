"""Where each parameter's gradient lies in a buffer, and which parameters form a bucket. Pure arithmetic.

Parameters are laid out in reverse order of registration, which is about the order in which backward finishes them, so
that buckets fill one after the other:

    registration   embedding  layer 0  layer 1  output
    buffer         [ output | layer 1 ] [ layer 0 | embedding ]
                     bucket 0             bucket 1

Parameters of one *unit* (the experts of a grouped product) keep their own order and stay in one bucket, so that their
views lie at equal distances. Buckets divide into equal shards, one for each rank that reduces them.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

PARAM_ALIGNMENT = 64
"""Elements; each gradient starts at such a multiple, 256 bytes in fp32, for kernels that write it with wide stores.
Shards start at such multiples too: a kernel that treats the last elements of a tensor otherwise than whole vectors then
gives the same bits for a part of a parameter as for the whole one."""

HIGH_BUSBW_ALIGNMENT = 2**16
"""Elements; bucket sizes at which NCCL's algorithms split evenly over channels."""


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: the positions of its parameters in registration order, and its range in the buffer."""

    params: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class BufferLayout:
    """A whole buffer; `offsets[i]` is the first element of the parameter registered as number i."""

    offsets: tuple[int, ...]
    buckets: tuple[BucketLayout, ...]

    @property
    def num_elements(self) -> int:
        """Length of the buffer, padding included."""
        return self.buckets[-1].end if self.buckets else 0


def default_bucket_size(dp_cp_size: int) -> int:
    """Elements per bucket that keep the collective bandwidth-bound as the group grows."""
    return max(40_000_000, 1_000_000 * dp_cp_size)


def bucket_alignment(num_shards: int, for_high_busbw: bool) -> int:
    """Elements of which a bucket is a multiple, so that it divides into `num_shards` aligned shards.

    It does not depend on whether the shards are used: the same sums run in the same order with and without ZeRO.
    """
    alignment = PARAM_ALIGNMENT * num_shards
    return math.lcm(alignment, HIGH_BUSBW_ALIGNMENT) if for_high_busbw else alignment


def shard_range(num_elements: int, rank: int, num_shards: int) -> tuple[int, int]:
    """First element of the shard of `rank` in a bucket of `num_elements`, and the one behind its last."""
    size, rest = divmod(num_elements, num_shards)
    assert rest == 0, f"a bucket of {num_elements} elements does not divide into {num_shards} shards"
    return rank * size, (rank + 1) * size


def plan_buffer(
    numels: Sequence[int],
    bucket_size: int | None,
    alignment: int = 1,
    units: Sequence[int] | None = None,
    alone: Collection[int] = (),
) -> BufferLayout:
    """Lay out parameters of `numels` elements, given in registration order.

    A bucket is closed by the unit with which it reaches `bucket_size` elements; None means one bucket for all. Each
    bucket ends at a multiple of `alignment`. `units[i]` is any number that the parameters of one unit share; None makes
    each parameter a unit. The parameters registered as numbers `alone` get a bucket each.
    """
    offsets = [0] * len(numels)
    buckets: list[BucketLayout] = []
    members: list[int] = []
    start = cursor = num_filled = 0
    members_of: dict[int, list[int]] = {}
    for index, unit in enumerate(units or range(len(numels))):
        members_of.setdefault(unit, []).append(index)
    queue = list(reversed(members_of.values()))
    for unit, following in zip_longest(queue, queue[1:]):
        for index in unit:
            offsets[index] = cursor
            cursor = _round_up(cursor + numels[index], PARAM_ALIGNMENT)
        members += unit
        num_filled += sum(numels[index] for index in unit)
        is_full = bucket_size is not None and num_filled >= bucket_size
        is_border = following is None or not set(alone).isdisjoint(unit) or not set(alone).isdisjoint(following)
        if is_full or is_border:
            cursor = _round_up(cursor, alignment)
            buckets.append(BucketLayout(tuple(members), start, cursor))
            members, start, num_filled = [], cursor, 0
    return BufferLayout(tuple(offsets), tuple(buckets))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
