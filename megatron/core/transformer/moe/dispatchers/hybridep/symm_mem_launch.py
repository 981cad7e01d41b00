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

    warps: int = 4
    """Per block."""

    tokens: int = 1
    """At a time; push only."""

    def width(self, hidden_size: int) -> int:
        """Columns at a time of rows that are this wide, a power of two."""
        return min(self.columns, next_power_of_2(hidden_size))


@dataclass(frozen=True)
class Launch:
    """Of all kernels that move rows."""

    push: Tiling = Tiling(64, warps=16, tokens=8)
    expand: Tiling = Tiling(2112, warps=8)
    reduce: Tiling = Tiling(1056)
    add: Tiling = Tiling(2112, warps=8)

    @classmethod
    def of(cls, num_blocks: int | None) -> Launch:
        """The defaults, or `num_blocks` blocks for each kernel; few where every block is interpreted."""
        blocks = num_blocks or (2 if is_interpreted() else None)
        chosen = cls()
        if blocks is None:
            return chosen
        tilings = {name: replace(getattr(chosen, name), blocks=blocks) for name in ("push", "expand", "reduce", "add")}
        return cls(**tilings)


def next_power_of_2(count: int) -> int:
    """Smallest power of two that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()
