"""Where each parameter's gradient lies in a buffer, and which parameters form a bucket. Pure arithmetic.

Parameters are laid out in reverse order of registration, which is about the order in which backward finishes them, so
that buckets fill one after the other:

    registration   embedding  layer 0  layer 1  output
    buffer         [ output | layer 1 ] [ layer 0 | embedding ]
                     bucket 0             bucket 1
"""

from collections.abc import Sequence
from dataclasses import dataclass

PARAM_ALIGNMENT = 64
"""Elements; each gradient starts at such a multiple, 256 bytes in fp32, for kernels that write it with wide stores."""

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


def plan_buffer(numels: Sequence[int], bucket_size: int | None, bucket_alignment: int = 1) -> BufferLayout:
    """Lay out parameters of `numels` elements, given in registration order.

    A bucket is closed by the parameter with which it reaches `bucket_size` elements; None means one bucket for all.
    Each bucket ends at a multiple of `bucket_alignment`.
    """
    offsets = [0] * len(numels)
    buckets: list[BucketLayout] = []
    members: list[int] = []
    start = cursor = num_filled = 0
    for index in reversed(range(len(numels))):
        offsets[index] = cursor
        members.append(index)
        num_filled += numels[index]
        cursor = _round_up(cursor + numels[index], PARAM_ALIGNMENT)
        is_full = bucket_size is not None and num_filled >= bucket_size
        if is_full or index == 0:
            cursor = _round_up(cursor, bucket_alignment)
            buckets.append(BucketLayout(tuple(members), start, cursor))
            members, start, num_filled = [], cursor, 0
    return BufferLayout(tuple(offsets), tuple(buckets))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
