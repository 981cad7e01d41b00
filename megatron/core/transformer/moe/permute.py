"""Move tokens into rows sorted by expert, and back.

A routing map bool [T, E] becomes a `RowOrder`: for every chosen (expert, token) pair one row, ordered by expert, within
an expert by token. `permute` copies each token into its rows together with its probabilities; `unpermute` adds the rows
of a token up again. Each is the other's gradient.

    tokens [T, h]  --permute-->  rows [M, h]  expert 0: t1 t4 t7 | expert 1: t0 t1 | ...
                   <-unpermute-               (sums the rows of t1 in expert order)

Sums run in fp32 at least and are rounded once, in an order that does not depend on the device's scheduling: two runs
give the same bits.

With `--moe-permute-fusion` kernels do the same along a `RowLayout`, with sums in the same order; without a GPU their
plain form runs.

`RowShuffle` is the other half: rows that arrive grouped by source rank are regrouped by expert, a plain reordering.

Legend: T tokens, E experts (n on this rank), M rows, h width, W ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.fusions.fused_permute import gather_rows, permute_rows, unpermute_rows
from megatron.core.fusions.fused_row_layout import RowLayout, expert_slots, row_layout
from megatron.core.utils.upcast import wide_dtype


@dataclass(frozen=True)
class RowOrder:
    """Which token and which probability each row carries."""

    token_ids: torch.Tensor
    """int64 [M]"""

    pair_ids: torch.Tensor
    """int64 [M], position of (token, expert) in the flattened [T, E]."""

    slots: torch.Tensor | None
    """int64 [T, rows per token], the rows of each token in expert order; None if their number differs."""

    num_tokens: int
    """T"""


@dataclass(frozen=True)
class FusedRowOrder:
    """The same for kernels."""

    expert_ids: torch.Tensor
    """int32 [T, K], experts of each token, -1 = none."""

    layout: RowLayout
    """Which row each of them takes, and what each row holds."""


def build_row_order(
    routing_map: torch.Tensor,
    num_rows: int,
    rows_per_token: int | None = None,
    fused_slots: int | None = None,
    multiple: int = 1,
) -> RowOrder | FusedRowOrder:
    """Order the True entries of a routing map bool [T, E]; there must be exactly `num_rows` of them.

    `rows_per_token` may be given if it is the same for all tokens: GPUs then sum without sorting again. `fused_slots`
    asks for the form with kernels, and says how many rows a token has at most; it can pad the rows of each column with
    zeros to a multiple, and `num_rows` is then a bound.
    Host: no synchronisation.
    """
    if fused_slots is not None:
        ids = expert_slots(routing_map, fused_slots)
        layout = row_layout(ids, routing_map.shape[1], num_rows, multiple, has_tail=multiple > 1)
        return FusedRowOrder(ids, layout)
    assert multiple == 1, f"multiple={multiple}: the plain form of a permutation pads nothing"
    num_tokens, num_experts = routing_map.shape
    pairs = torch.nonzero_static(routing_map.t(), size=num_rows)  # [M, 2], sorted by expert, then token
    experts, token_ids = pairs[:, 0], pairs[:, 1].contiguous()
    slots = None
    if rows_per_token is not None and routing_map.is_cuda:
        slots = token_ids.argsort(stable=True).view(num_tokens, rows_per_token)
    return RowOrder(token_ids, token_ids * num_experts + experts, slots, num_tokens)


def slot_values(per_column: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Pick the slots' values: [T, C], ids int32 [T, K] -> [T, K], zero in empty slots; differentiable."""
    picked = per_column.gather(1, expert_ids.clamp(min=0).long())
    return picked.masked_fill(expert_ids < 0, 0)


def permute(
    hidden: torch.Tensor, probs: torch.Tensor, order: RowOrder | FusedRowOrder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy tokens into rows: hidden [T, h], probs [T, E] -> rows [M, h], row probs [M], dtypes unchanged.

    Memory: keeps index tensors for backward, no activation.
    """
    if isinstance(order, FusedRowOrder):
        rows, row_probs = permute_rows(hidden, slot_values(probs, order.expert_ids), order.layout)
        assert row_probs is not None, "probabilities were given"
        return rows, row_probs
    return _Permute.apply(hidden, probs, order.token_ids, order.pair_ids, order.slots)


def unpermute(rows: torch.Tensor, order: RowOrder | FusedRowOrder, dtype: torch.dtype) -> torch.Tensor:
    """Add up the rows of each token: [M, h] -> [T, h] in `dtype`; a token without rows is zero.

    Memory: keeps index tensors for backward, no activation.
    """
    if isinstance(order, FusedRowOrder):
        return unpermute_rows(rows, order.layout, dtype)
    return _Unpermute.apply(rows, order.token_ids, order.slots, order.num_tokens, dtype)


def sum_rows(
    rows: torch.Tensor, token_ids: torch.Tensor, slots: torch.Tensor | None, num_tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sum rows [M, h] into tokens [T, h]: token ids [M], slots [T, rows per token] or None.

    Dtype: accumulated in fp32 at least, returned in `dtype`.
    """
    wide = torch.promote_types(wide_dtype(rows.dtype), dtype)
    if slots is not None:
        gathered = rows.index_select(0, slots.flatten()).view(*slots.shape, rows.shape[1])
        return gathered.sum(dim=1, dtype=wide).to(dtype)
    total = rows.new_zeros(num_tokens, rows.shape[1], dtype=wide)
    if rows.is_cuda:
        # sorts the indices and sums serially; index_add_ would use atomics, whose order varies
        total.index_put_((token_ids,), rows.to(wide), accumulate=True)
    else:
        total.index_add_(0, token_ids, rows.to(wide))
    return total.to(dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        probs: torch.Tensor,
        token_ids: torch.Tensor,
        pair_ids: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(token_ids, pair_ids, slots)
        ctx.probs_shape, ctx.dtype = probs.shape, hidden.dtype
        ctx.set_materialize_grads(False)
        return hidden.index_select(0, token_ids), probs.flatten().index_select(0, pair_ids)

    @staticmethod
    def backward(
        ctx: Any, grad_rows: torch.Tensor | None, grad_row_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        token_ids, pair_ids, slots = ctx.saved_tensors
        grad_hidden = grad_probs = None
        if grad_rows is not None and ctx.needs_input_grad[0]:
            grad_hidden = sum_rows(grad_rows, token_ids, slots, ctx.probs_shape[0], ctx.dtype)
        if grad_row_probs is not None and ctx.needs_input_grad[1]:
            flat = grad_row_probs.new_zeros(ctx.probs_shape[0] * ctx.probs_shape[1])
            grad_probs = flat.index_copy_(0, pair_ids, grad_row_probs.contiguous()).view(ctx.probs_shape)
        return grad_hidden, grad_probs, None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        slots: torch.Tensor | None,
        num_tokens: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(token_ids)
        ctx.dtype = rows.dtype
        return sum_rows(rows, token_ids, slots, num_tokens, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (token_ids,) = ctx.saved_tensors
        return grad.to(ctx.dtype).index_select(0, token_ids), None, None, None, None


@dataclass(frozen=True)
class RowShuffle:
    """A reordering of rows and its inverse."""

    forward_ids: torch.Tensor
    """int64 [R], row of the input that each row of the output is."""

    backward_ids: torch.Tensor
    """int64 [R], the inverse."""

    is_fused: bool = False
    """Kernels copy the rows."""

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder [R, ...] -> [R, ...]."""
        return _Shuffle.apply(rows, self.forward_ids, self.backward_ids, self.is_fused)

    def undo(self, rows: torch.Tensor) -> torch.Tensor:
        """Restore the order from before `apply`, [R, ...] -> [R, ...]."""
        return _Shuffle.apply(rows, self.backward_ids, self.forward_ids, self.is_fused)


def regroup_by_expert(counts: torch.Tensor, num_rows: int, *, is_fused: bool = False) -> RowShuffle:
    """Shuffle rows from (source rank, expert) order into (expert, source rank) order: counts int64 [W, n].

    Host: no synchronisation; `num_rows` is the sum of the counts.
    """
    source_major, expert_major = counts, counts.t()
    starts = _starts(source_major)  # [W, n], first row of each chunk before
    targets = _starts(expert_major).t()  # [W, n], and after
    rows = torch.arange(num_rows, device=counts.device)
    forward_ids = rows + _spread((starts - targets).t(), expert_major, num_rows)
    backward_ids = rows + _spread(targets - starts, source_major, num_rows)
    return RowShuffle(forward_ids, backward_ids, is_fused)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """First row of each chunk if the chunks follow each other in the order of `counts` [a, b] -> [a, b]."""
    flat = counts.flatten()
    return (flat.cumsum(0) - flat).view(counts.shape)


def _spread(values: torch.Tensor, counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Repeat each value [a, b] for the rows of its chunk, counts [a, b] -> [R]."""
    return torch.repeat_interleave(values.flatten(), counts.flatten(), output_size=num_rows)


def _reorder(rows: torch.Tensor, ids: torch.Tensor, is_fused: bool) -> torch.Tensor:
    if is_fused and rows.dim() == 2:
        return gather_rows(rows, None, ids, 1)[0]
    return rows.index_select(0, ids)


class _Shuffle(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ids: torch.Tensor, inverse_ids: torch.Tensor, is_fused: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(ids, inverse_ids)
        ctx.is_fused = is_fused
        return _reorder(rows, ids, is_fused)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, inverse_ids = ctx.saved_tensors
        return _reorder(grad, inverse_ids, ctx.is_fused), None, None, None
