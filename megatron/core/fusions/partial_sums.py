"""The sums that the programs of a kernel left, added up and rounded in one launch.

A kernel that adds over many rows leaves one partial sum for each program, because adding to one place in the order in
which programs happen to run would give other bits every time. This adds them in a fixed order.

Legend: n sums, p programs, w width of a sum.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
import torch

from megatron.core import streams
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

ROWS, COLUMNS, WARPS = 512, 8, 8
"""What a program reads at a time, and with how many warps: few columns, so that narrow sums have many programs too."""


def add_partial_sums(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Partial sums fp32 [n, p, w] -> sums [n, w] of `dtype`; p may be 0. Graph: capturable."""
    num_sums, num_parts, width = partial.shape
    total = partial.new_empty(num_sums, width, dtype=dtype)
    streams.declare("partial sums", (partial,), (total,))
    _add_kernel[(-(-width // COLUMNS), num_sums)](
        partial,
        total,
        num_parts,
        width,
        interpreted=is_interpreted(),
        rows=ROWS,
        columns=COLUMNS,
        num_warps=WARPS,
    )
    return total


@triton_jit
def _add_kernel(
    partial,
    total,
    num_parts,
    width,
    interpreted: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Some columns of one sum: partial fp32 [n, p, w] -> total [n, w]."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    base = partial + tl.program_id(1).to(tl.int64) * num_parts * width
    sums = tl.zeros([rows, columns], tl.float32)
    for first in range(0, num_parts, rows):
        row = first + tl.arange(0, rows)
        is_entry = (row < num_parts)[:, None] & (column < width)[None, :]
        sums += tl.load(base + row[:, None] * width + column[None, :], mask=is_entry, other=0.0)
    target = total + tl.program_id(1) * width + column
    tl.store(target, narrow(tl.sum(sums, 0), total.dtype.element_ty, interpreted), mask=column < width)
