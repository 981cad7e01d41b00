"""The flex dispatcher: tokens travel once per destination rank, and arrive as rows in the order of experts.

    dispatch_preprocess   map and probabilities to slots; what follows from this rank's routing alone     compute
    token_dispatch        engine.dispatch: exchange, and copy into expert order                           communication
    dispatch_postprocess  nothing: rows lie as the experts want them
    combine_preprocess    nothing
    token_combine         engine.combine: add up a token's rows per rank, exchange, add up the ranks      communication
    combine_postprocess   nothing

Sizes. Unless they follow from the number of tokens alone (every expert padded to its capacity; all experts here and
nothing dropped), they depend on the routing: the host reads them once, or --moe-expert-rank-capacity-factor gives a
budget of rows per rank, counts stay on the device, and rows beyond the budget are dropped and flagged.

With expert tensor parallelism a token goes to all shards of its experts: the sum over ranks that combines their
results also adds up the shards' summands, and likewise the gradients of the probabilities.

Legend: T tokens, K slots, h width, E experts, W ranks of the group, n experts on each, P rows at this rank's experts.
"""

import dataclasses
from typing import Any

import torch

from megatron.core import step_guard
from megatron.core.configs.base import Violation, violation
from megatron.core.fp8.layer_state import expert_row_multiple
from megatron.core.fusions.fused_row_layout import expert_slots
from megatron.core.transformer.moe.dispatchers.hybridep.engine import (
    EngineSetup,
    HybridEPEngine,
    check_backend,
    shared_engine,
)
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import (
    Exchange,
    expand_to_shards,
    round_up,
    row_budget,
    worst_case_rows,
)
from megatron.core.transformer.moe.dispatchers.token_counts import most_tokens
from megatron.core.transformer.moe.permute import slot_values
from megatron.core.transformer.moe.token_dispatcher import DispatcherTraits, DispatchState, MoETokenDispatcher
from megatron.core.utils.upcast import wide_dtype


@dataclasses.dataclass(kw_only=True)
class FlexState(DispatchState):
    """One microbatch of one layer."""

    exchange: Exchange
    """Routing and sizes, on the device."""


class MoEFlexTokenDispatcher(MoETokenDispatcher):
    """Moves tokens with one of the engines."""

    has_row_budget = True
    has_backends = True
    packs_rows = True

    @classmethod
    def check(cls, config: Any) -> list[Violation]:
        """A budget needs a balanced load to be relative to, and rows that vary."""
        factor, found = config.moe_expert_rank_capacity_factor, []
        if factor is not None and factor <= 0:
            remedy = "set --moe-expert-rank-capacity-factor above 0; 1 is a balanced load"
            found.append(violation(config, "moe_expert_rank_capacity_factor", "a budget holds rows", remedy))
        if factor is not None and config.moe_pad_expert_input_to_capacity:
            names = "moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity"
            remedy = "drop one of --moe-expert-rank-capacity-factor and --moe-pad-expert-input-to-capacity"
            found.append(violation(config, names, "experts padded to capacity have a fixed number of rows", remedy))
        return found + check_backend(config)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        config = self.config
        self.row_multiple = expert_row_multiple(config)
        setup = EngineSetup(
            group=self.expert_ranks_group,
            num_local_experts=self.num_local_experts,
            hidden_size=config.hidden_size,
            row_multiple=self.row_multiple,
            num_sms=config.moe_flex_dispatcher_num_sms,
        )
        self.engine = shared_engine(config.moe_flex_dispatcher_backend, config.moe_hybridep_engine, setup)
        self._packs = config.moe_dispatch_fwd_dtype == "fp8"

    @property
    def traits(self) -> DispatcherTraits:
        """Traits in this configuration."""
        is_static = self._sizes_are_known or self.config.moe_expert_rank_capacity_factor is not None
        return DispatcherTraits(
            host_sync_free=not self.engine.reads_counts(is_static),
            static_shapes=is_static,
            deduplicates=True,
            postprocess_aliases_input=True,
            fuses_permute=True,
            overlaps_shared_experts=False,
            supports_capacity=True,
            probs_dtype=wide_dtype(self.probs_dtype),
        )

    @property
    def _sizes_are_known(self) -> bool:
        """True if the number of rows follows from the number of tokens."""
        return self.is_padded or (self.has_all_experts and self.is_dropless)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, FlexState]:
        """Hidden [T, h], map bool [T, E], probs [T, E] -> hidden [T, h], probs of the slots [T, K], state."""
        num_slots = (self.num_experts if self.is_padded else self.topk) * self.etp_size
        shards = (self.num_local_experts, self.etp_size)
        ids = expert_slots(expand_to_shards(routing_map, *shards), num_slots)
        slot_probs = slot_values(expand_to_shards(probs.to(wide_dtype(probs.dtype)), *shards), ids)
        exchange = Exchange(expert_ids=ids)
        self._set_sizes(exchange, hidden_states.shape[0], hidden_states.device)
        self.engine.prepare(exchange)
        state = FlexState(num_tokens=hidden_states.shape[0], hidden_dtype=hidden_states.dtype, exchange=exchange)
        return hidden_states, slot_probs, state

    def _set_sizes(self, exchange: Exchange, num_tokens: int, device: torch.device) -> None:
        """Give the exchange its static sizes, if it has any."""
        local, ranks = self.num_local_experts, self.ep_size * self.etp_size
        factor = self._row_factor
        if self.is_padded:
            rows = round_up(self.padded_capacity(num_tokens, device) * ranks, self.row_multiple)
            exchange.max_tokens, exchange.row_budget = num_tokens, rows * local
            exchange.host_tokens_per_expert = [rows] * local
        elif self._sizes_are_known:
            rows = worst_case_rows(num_tokens, self.topk, 1, local, self.row_multiple)
            exchange.max_tokens, exchange.row_budget = num_tokens, rows
        elif factor is not None:
            most = self.agree_on(num_tokens, device, most_tokens)
            slots = exchange.expert_ids.shape[1]
            budget = row_budget(most, slots, factor, local, self.row_multiple)
            exchange.max_tokens = most
            exchange.row_budget = min(budget, worst_case_rows(most, slots, ranks, local, self.row_multiple))

    @property
    def _row_factor(self) -> float | None:
        """The budget of this step: what its guard sets; without a guard the configured one."""
        guard = step_guard.active()
        return self.config.moe_expert_rank_capacity_factor if guard is None else guard.row_factor

    def _report(self, exchange: Exchange) -> None:
        """Tell the step's guard, if there is one, how many rows a budget would have had to hold."""
        guard, budget, dropped = step_guard.active(), exchange.row_budget, exchange.dropped_rows
        if guard is None or guard.row_factor is None or self._sizes_are_known or budget is None or dropped is None:
            return
        assert exchange.tokens_per_expert is not None, "counts are set by the engine"
        needed = torch.where(dropped > 0, dropped + budget, exchange.tokens_per_expert.sum())
        guard.report_rows(needed, budget, (exchange.max_tokens or 0) * exchange.expert_ids.shape[1])

    def token_dispatch(
        self, rows: torch.Tensor, probs: torch.Tensor, state: FlexState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden [T, h], probs [T, K] -> rows [P, h] by expert, their probabilities [P]."""
        rows, probs = _Dispatch.apply(rows, probs, self.engine, state.exchange, self._packs)
        exchange = state.exchange
        state.tokens_per_expert = exchange.tokens_per_expert
        state.host_tokens_per_expert = exchange.host_tokens_per_expert
        state.dropped_rows = exchange.dropped_rows
        self._report(exchange)
        return rows, probs

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor, state: FlexState
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [P, h] as they came, tokens_per_expert int64 [n], probs [P]."""
        assert state.tokens_per_expert is not None, "counts are set by token_dispatch"
        return rows, state.tokens_per_expert, probs

    def combine_preprocess(self, rows: torch.Tensor, state: FlexState) -> torch.Tensor:
        """Rows [P, h] as they are."""
        return rows

    def token_combine(self, rows: torch.Tensor, state: FlexState) -> torch.Tensor:
        """Rows [P, h] -> sums [T, h]."""
        return _Combine.apply(rows, self.engine, state.exchange)

    def combine_postprocess(self, rows: torch.Tensor, state: FlexState) -> torch.Tensor:
        """Sums [T, h] in the dtype of the hidden states."""
        return rows.to(state.hidden_dtype)


class _Dispatch(torch.autograd.Function):
    """Forward dispatch, backward combine along the saved exchange."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, probs: torch.Tensor, engine: HybridEPEngine, exchange: Exchange, packs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.engine, ctx.exchange = engine, exchange
        dispatch = engine.dispatch_packed if packs else engine.dispatch
        return dispatch(exchange, hidden, probs)

    @staticmethod
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_probs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_slots = ctx.engine.combine(ctx.exchange, grad_rows, grad_probs)
        return grad_hidden, grad_slots, None, None, None


class _Combine(torch.autograd.Function):
    """Forward combine, backward dispatch along the saved exchange."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, engine: HybridEPEngine, exchange: Exchange) -> torch.Tensor:
        ctx.engine, ctx.exchange = engine, exchange
        return engine.combine(exchange, rows, None)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.engine.dispatch(ctx.exchange, grad, None)[0], None, None
