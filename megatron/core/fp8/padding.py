"""Rows of experts, padded so that each expert's part begins and ends at a multiple.

FP8 kernels take sums over rows in pieces of 16, blocks of scales hold 128. Padding rows are zeros: they add nothing to
a weight gradient, and what is computed from them is dropped.

    rows    a a a | b | c c        padded to 4    a a a 0 | b 0 0 0 | c c 0 0

Neither direction keeps rows for its gradient, only where they go; each is the other's gradient.

The number of padded rows follows from the number of rows alone, never from the routing.

Legend: R rows sorted by expert, P padded rows, n experts.
"""

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class RowPadding:
    """Where rows go; made on the device, without the host waiting."""

    place: torch.Tensor
    """int64 [R], the padded row of each row."""

    tokens_per_expert: torch.Tensor
    """int64 [n], padded rows of each expert."""

    num_padded: int
    """P."""

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Spread rows [R, ...] over zeros [P, ...]."""
        return _Pad.apply(rows, self.place, self.num_padded)

    def unpad(self, rows: torch.Tensor) -> torch.Tensor:
        """Take the rows [R, ...] out of [P, ...]."""
        return _Unpad.apply(rows, self.place)


def plan_padding(tokens_per_expert: torch.Tensor, num_rows: int, multiple: int) -> RowPadding:
    """Plan for tokens_per_expert int [n] and R rows; rows behind the last expert's stay behind it."""
    counts = tokens_per_expert.to(torch.int64)
    padded = (counts + multiple - 1) // multiple * multiple
    added = torch.cat([counts.new_zeros(1), (padded - counts).cumsum(0)])  # padding rows in front of each expert
    rows = torch.arange(num_rows, device=counts.device)
    owner = torch.searchsorted(counts.cumsum(0), rows, right=True)
    num_padded = num_rows + counts.numel() * (multiple - 1)
    return RowPadding(rows + added[owner], padded, -(-num_padded // multiple) * multiple)


def _spread(rows: torch.Tensor, place: torch.Tensor, num_padded: int) -> torch.Tensor:
    return rows.new_zeros(num_padded, *rows.shape[1:]).index_copy_(0, place, rows)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, place: torch.Tensor, num_padded: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        return _spread(rows, place, num_padded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return grads[0].index_select(0, place), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.num_padded = rows.shape[0]
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _spread(grads[0], place, ctx.num_padded), None
