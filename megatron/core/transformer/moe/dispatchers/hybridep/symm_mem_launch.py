"""How many blocks the kernels of symm_mem run with, and how much each has under way at a time.

The figures come from `tools/benchmark/dispatch.py --sweep` on an H200. All ranks of a group must use the same ones: a
receiver counts the reports of a sender's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.fusions.triton_casts import is_interpreted


@dataclass(frozen=True)
class Tiling:
    """Of one kernel."""

    blocks: int
    """Each loops over its share of the tokens."""

    columns: int = 2048
    """Of a row at a time."""

    warps: int = 8
    """Per block, at most."""

    tokens: int = 1
    """At a time; push only."""

    blocks_per_sm: int = 8
    """How many run on a multiprocessor at once, by threads and registers."""

    def width(self, hidden_size: int) -> int:
        """Columns at a time of rows that are this wide, a power of two."""
        return min(self.columns, next_power_of_2(hidden_size))

    def num_warps(self, hidden_size: int) -> int:
        """Not more than have 8 elements per thread, which are 16 bytes in half precision."""
        return min(self.warps, max(1, self.width(hidden_size) * self.tokens // (8 * 32)))

    def on(self, num_sms: int) -> Tiling:
        """The same with as many blocks as fill this many multiprocessors."""
        return replace(self, blocks=num_sms * self.blocks_per_sm)


@dataclass(frozen=True)
class Launch:
    """Of all kernels that move rows."""

    push: Tiling = Tiling(132, warps=16, tokens=8, blocks_per_sm=1)
    expand: Tiling = Tiling(8448)
    reduce: Tiling = Tiling(1056, warps=4)
    add: Tiling = Tiling(8448)

    @classmethod
    def of(cls, num_sms: int | None, hidden_size: int) -> Launch:
        """The fastest for rows this wide on a device without other work, or blocks for `num_sms` multiprocessors.

        Blocks are placed where there is room: beside a product that fills all but n multiprocessors, on those n.
        """
        chosen = cls(reduce=next(tiling for width, tiling in REDUCE_BY_WIDTH if hidden_size >= width))
        if is_interpreted():
            num_sms, chosen = 1, cls(*(replace(t, blocks_per_sm=2) for t in chosen.tilings()))
        return chosen if num_sms is None else cls(*(tiling.on(num_sms) for tiling in chosen.tilings()))

    def tilings(self) -> tuple[Tiling, Tiling, Tiling, Tiling]:
        """Of push, expand, reduce and add."""
        return self.push, self.expand, self.reduce, self.add


REDUCE_BY_WIDTH = ((6144, Tiling(528, blocks_per_sm=4)), (4096, Tiling(1056)), (0, Tiling(1056, warps=4)))
"""Tiling of reduce for rows of at least so many elements. Wider ones keep more under way in fewer blocks."""


def next_power_of_2(count: int) -> int:
    """Smallest power of two that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()
