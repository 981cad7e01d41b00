"""The all-to-all dispatcher with a row budget: every pair of ranks exchanges equally many rows, whatever the routing.

    rank 0   to 0 [e0 e1 e1 .] to 1 [e2 e3 . .] --+-- all-to-all --> [from 0: e0 e1 e1 . | from 1: e0 . . .]
    rank 1   to 0 [e0 . . .] to 1 [e2 e2 e3 e3] --+                  --sort--> [e0 e0 e1 e1 . . . .]

A pair has B slots, B = T k / W * the budget's factor; `.` is a slot without a row. Counts travel as a small tensor and
stay on the device; the experts learn from it how many of their R = W B rows are real. What no row fills, in forward and
in backward, is undefined, is sent all the same, and is read by nobody.

More rows for a destination than B: the rest is left out and the step's guard is told, who then lets nothing of the step
stay. Without a budget (`step_guard.row_factor`) sizes are exact, as in the base class. Real rows are in the same order
and groups in both forms, so that both give the same bits.

Legend: T tokens, h width, k experts per token, W ranks, n experts per rank, B slots for each pair, S = W B slots sent,
X shards of an expert (ETP), R = X W B rows at the experts of this rank.
"""

import dataclasses
import math
from typing import Any

import torch

from megatron.core import step_guard
from megatron.core.transformer.moe.dispatchers.alltoall import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.moe.dispatchers.exchange import (
    exchange_counts,
    exchange_rows,
    gather_rows,
    reduce_rows,
)
from megatron.core.transformer.moe.dispatchers.token_counts import most_tokens
from megatron.core.transformer.moe.permute import RowShuffle, sum_rows
from megatron.core.transformer.moe.token_dispatcher import DispatcherTraits, DispatchState


@dataclasses.dataclass(frozen=True)
class SlotOrder:
    """Which routed pair (token, expert) each slot carries, and where each pair is. Pairs go by expert, then token."""

    token_of_slot: torch.Tensor
    """int64 [S]; any token for a slot without a row"""

    entry_of_slot: torch.Tensor
    """int64 [S], place of the pair in the flattened [T, E]; any for a slot without a row"""

    entry_of_pair: torch.Tensor
    """int64 [T k], the same by pair"""

    slot_of_pair: torch.Tensor
    """int64 [T k]; any slot for a pair that was left out"""

    slots: torch.Tensor
    """int64 [T, k], the slots of each token in expert order"""


@dataclasses.dataclass(kw_only=True)
class PaddedState(DispatchState):
    """One microbatch of one layer under a budget."""

    order: SlotOrder
    """From tokens to slots and back."""

    kept: torch.Tensor
    """int64 [W, n], rows sent to each expert."""

    splits: list[int]
    """[W], B for every rank."""

    shuffle: RowShuffle | None = None
    """From arrival order to expert order, set by dispatch; None with a single source."""


def slots_per_pair(num_pairs: int, num_ranks: int, factor: float, most: int) -> int:
    """B for T k routed pairs: the balanced share times the factor, at most the `most` that one rank can get."""
    return max(1, min(math.ceil(num_pairs / num_ranks * factor), most))


def order_slots(routing_map: torch.Tensor, topk: int, num_ranks: int, num_slots: int) -> tuple[SlotOrder, torch.Tensor]:
    """Lay out a map bool [T, E] with k entries per token in B slots per rank -> order, rows per expert int64 [W, n].

    Host: no synchronisation.
    """
    num_tokens, num_experts = routing_map.shape
    wanted = routing_map.sum(dim=0).view(num_ranks, -1)  # [W, n]
    pairs = torch.nonzero_static(routing_map.t(), size=num_tokens * topk)  # [T k, 2]
    experts, token_ids = pairs[:, 0], pairs[:, 1].contiguous()
    entries = token_ids * num_experts + experts
    rows_to = wanted.sum(dim=1)
    starts = rows_to.cumsum(0) - rows_to  # first pair of each destination
    device = routing_map.device
    places = torch.arange(num_slots, device=device)
    pair_of_slot = (starts.unsqueeze(1) + places).clamp_(max=max(num_tokens * topk - 1, 0)).flatten()
    destinations = experts // wanted.shape[1]
    place = torch.arange(num_tokens * topk, device=device) - starts.index_select(0, destinations)
    slot_of_pair = destinations * num_slots + place.clamp_(max=num_slots - 1)
    slots = slot_of_pair.index_select(0, token_ids.argsort(stable=True)).view(num_tokens, topk)
    order = SlotOrder(
        token_of_slot=_rows_of(token_ids, pair_of_slot),
        entry_of_slot=_rows_of(entries, pair_of_slot),
        entry_of_pair=entries,
        slot_of_pair=slot_of_pair,
        slots=slots,
    )
    return order, wanted


def _rows_of(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows [n, ...] by ids int64 [m] -> [m, ...]; zeros on a rank without any."""
    return rows.index_select(0, ids) if rows.shape[0] else rows.new_zeros(ids.shape[0], *rows.shape[1:])


def fit_counts(wanted: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Cut rows per expert, int64 [W, n], off where a rank's B slots end -> [W, n]."""
    ends = wanted.cumsum(dim=1).clamp_(max=num_slots)
    return ends - torch.cat([ends.new_zeros(ends.shape[0], 1), ends[:, :-1]], dim=1)


def compact_by_expert(table: torch.Tensor, num_slots: int) -> RowShuffle:
    """Shuffle slots grouped by source into rows by (expert, source): table int64 [X W, n], B slots per source.

    Real rows come first; which slots the rows behind them show is undefined, as is the row of an empty slot.
    Host: no synchronisation.
    """
    num_sources, num_experts = table.shape
    num_rows = num_sources * num_slots
    device = table.device
    source_starts = torch.arange(num_sources, device=device).unsqueeze(1) * num_slots
    starts = source_starts + table.cumsum(dim=1) - table  # [X W, n], first slot of each chunk
    flat = table.t().flatten()  # by expert, then source
    ends = flat.cumsum(0)
    targets = ends - flat  # [n X W], first row of each chunk
    rows = torch.arange(num_rows, device=device)
    chunks = torch.searchsorted(ends, rows, right=True).clamp_(max=flat.numel() - 1)
    forward_ids = rows + (starts.t().flatten() - targets).index_select(0, chunks)
    places = torch.arange(num_slots, device=device).expand(num_sources, num_slots).contiguous()
    experts = torch.searchsorted(table.cumsum(dim=1), places, right=True).clamp_(max=num_experts - 1)
    moved = targets.view(num_experts, num_sources).t() - starts  # [X W, n]
    backward_ids = (source_starts + places + moved.gather(1, experts)).flatten()
    return RowShuffle(forward_ids.clamp_(0, num_rows - 1), backward_ids.clamp_(0, num_rows - 1))


class MoEPaddedAlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends B rows to every rank while a budget is in force, exactly the routed ones otherwise."""

    has_row_budget = True

    @property
    def traits(self) -> DispatcherTraits:
        """Traits under the budget."""
        return dataclasses.replace(
            super().traits,
            host_sync_free=True,
            static_shapes=True,
            postprocess_aliases_input=self.has_all_experts,
        )

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Hidden [T, h], map bool [T, E], probs [T, E] -> slots [S, h], probs [S], state."""
        factor = step_guard.row_factor()
        if factor is None:
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        num_tokens = hidden_states.shape[0]
        tokens = self.agree_on(num_tokens, hidden_states.device, most_tokens)
        num_pairs = tokens * self.topk
        most = tokens * min(self.topk, self.num_local_experts)
        num_slots = slots_per_pair(num_pairs, self.ep_size, factor, most)
        order, wanted = order_slots(routing_map, self.topk, self.ep_size, num_slots)
        guard = step_guard.active()
        assert guard is not None, "a row budget without a guard: dropped rows would stay unnoticed"
        guard.report_rows(wanted.sum(dim=1), num_slots, num_pairs / self.ep_size)
        state = PaddedState(
            num_tokens=num_tokens,
            hidden_dtype=hidden_states.dtype,
            order=order,
            kept=fit_counts(wanted, num_slots),
            splits=[num_slots] * self.ep_size,
        )
        rows, row_probs = _ToSlots.apply(
            hidden_states,
            probs,
            order.token_of_slot,
            order.entry_of_slot,
            order.entry_of_pair,
            order.slot_of_pair,
            order.slots,
        )
        return rows, row_probs, state

    def token_dispatch(self, rows: torch.Tensor, probs: torch.Tensor, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange the counts, slots [S, h] and probs [S] -> [R, h], [R], ordered by shard, then source rank."""
        if not isinstance(state, PaddedState):
            return super().token_dispatch(rows, probs, state)
        table = gather_rows(exchange_counts(state.kept, self.ep_group), self.etp_group)
        state.tokens_per_expert = table.sum(dim=0)
        if table.shape[0] > 1:
            state.shuffle = compact_by_expert(table, state.splits[0])
        return self._exchange(rows, state), self._exchange(probs, state)

    def _exchange(self, rows: torch.Tensor, state: PaddedState) -> torch.Tensor:
        """Send slots [S, ...] to the ranks of the experts and to all shards -> [R, ...]."""
        return gather_rows(exchange_rows(rows, state.splits, state.splits, self.ep_group), self.etp_group)

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor, state: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Move the real ones of [R, h], [R] to the front, by expert -> rows [R, h], int64 [n], probs [R]."""
        if not isinstance(state, PaddedState):
            return super().dispatch_postprocess(rows, probs, state)
        assert state.tokens_per_expert is not None, "dispatch_postprocess before token_dispatch"
        if state.shuffle is not None:
            rows, probs = state.shuffle.apply(rows), state.shuffle.apply(probs)
        return rows, state.tokens_per_expert, probs

    def combine_preprocess(self, rows: torch.Tensor, state: Any) -> torch.Tensor:
        """Back to the slots of arrival: [R, h] -> [R, h]."""
        if state.shuffle is None:
            return rows
        return state.shuffle.undo(rows)

    def token_combine(self, rows: torch.Tensor, state: Any) -> torch.Tensor:
        """Add up what the shards made of each row and send slots [R, h] back -> [S, h]."""
        if not isinstance(state, PaddedState):
            return super().token_combine(rows, state)
        return exchange_rows(reduce_rows(rows, self.etp_group), state.splits, state.splits, self.ep_group)

    def combine_postprocess(self, rows: torch.Tensor, state: Any) -> torch.Tensor:
        """Add up the slots [S, h] of each token -> [T, h]."""
        if not isinstance(state, PaddedState):
            return super().combine_postprocess(rows, state)
        return _FromSlots.apply(rows, state.order.token_of_slot, state.order.slots, state.hidden_dtype)


class _ToSlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        probs: torch.Tensor,
        token_of_slot: torch.Tensor,
        entry_of_slot: torch.Tensor,
        entry_of_pair: torch.Tensor,
        slot_of_pair: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(token_of_slot, entry_of_pair, slot_of_pair, slots)
        ctx.probs_shape, ctx.dtype = probs.shape, hidden.dtype
        ctx.set_materialize_grads(False)
        return _rows_of(hidden, token_of_slot), _rows_of(probs.flatten(), entry_of_slot)

    @staticmethod
    def backward(
        ctx: Any, grad_rows: torch.Tensor | None, grad_row_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        token_of_slot, entry_of_pair, slot_of_pair, slots = ctx.saved_tensors
        grad_hidden = grad_probs = None
        if grad_rows is not None and ctx.needs_input_grad[0]:
            grad_hidden = sum_rows(grad_rows, token_of_slot, slots, ctx.probs_shape[0], ctx.dtype)
        if grad_row_probs is not None and ctx.needs_input_grad[1]:
            flat = grad_row_probs.new_zeros(ctx.probs_shape[0] * ctx.probs_shape[1])
            flat.index_copy_(0, entry_of_pair, grad_row_probs.index_select(0, slot_of_pair))
            grad_probs = flat.view(ctx.probs_shape)
        return grad_hidden, grad_probs, None, None, None, None, None


class _FromSlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, token_of_slot: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(token_of_slot)
        ctx.dtype = rows.dtype
        return sum_rows(rows, token_of_slot, slots, slots.shape[0], dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (token_of_slot,) = ctx.saved_tensors
        return _rows_of(grad.to(ctx.dtype), token_of_slot), None, None, None
