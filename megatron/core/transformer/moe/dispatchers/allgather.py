"""The all-gather dispatcher: every rank sees all tokens of the group and keeps the rows of its own experts.

    token_dispatch   all-gather of hidden, probabilities and map       [T, h] -> [W * T, h]
    token_combine    reduce-scatter of what the ranks' experts made    [W * T, h] -> [T, h]

It moves W * T rows whatever the routing is: simple, and for few ranks or many experts per token not slower. Ranks with
fewer tokens than others are padded to the largest count by rows that no expert takes.

Host: one wait per layer for the counts; none if every expert is padded to its capacity, or if all experts are on this
rank and nothing is dropped.

The group is that of expert and expert tensor parallelism together: the sum that combines the experts' results also adds
up the summands that the shards of one expert made.

Legend: T tokens of this rank, P tokens of the rank that has most, h width, E experts, n experts per rank, W ranks,
R rows at the experts.
"""

import dataclasses

import torch
import torch.nn.functional as F

from megatron.core.transformer.moe.dispatchers.exchange import gather_rows, reduce_rows
from megatron.core.transformer.moe.dispatchers.host_counts import HostCounts
from megatron.core.transformer.moe.permute import FusedRowOrder, RowOrder, permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import DispatcherTraits, DispatchState, MoETokenDispatcher
from megatron.core.utils.groups import group_rank


@dataclasses.dataclass(kw_only=True)
class AllGatherState(DispatchState):
    """One microbatch of one layer."""

    num_padded_tokens: int
    """P"""

    num_rows: int
    """R"""

    routing_map: torch.Tensor
    """bool [P, E] of this rank; after dispatch bool [W * P, n], all tokens and the experts of this rank."""

    order: RowOrder | FusedRowOrder | None = None
    """Which of the gathered tokens each row carries; set after dispatch."""


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Gathers all tokens of the ranks that together hold all experts on every one of them."""

    @property
    def traits(self) -> DispatcherTraits:
        """Traits in this configuration."""
        is_local = self.has_all_experts and self.is_dropless
        return DispatcherTraits(
            host_sync_free=self.is_padded or is_local,
            static_shapes=self.is_padded or is_local,
            deduplicates=True,
            postprocess_aliases_input=False,
            fuses_permute=False,
            overlaps_shared_experts=False,
            supports_capacity=True,
            probs_dtype=self.probs_dtype,
        )

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, AllGatherState]:
        """Hidden [T, h], map bool [T, E], probs [T, E] -> hidden [P, h], probs [P, E], state."""
        num_tokens = hidden_states.shape[0]
        state = AllGatherState(
            num_tokens=num_tokens,
            hidden_dtype=hidden_states.dtype,
            num_padded_tokens=num_tokens,
            num_rows=num_tokens * self.topk,
            routing_map=routing_map,
        )
        if self.is_padded:
            self._set_padded_counts(state)
        elif self.has_all_experts and self.is_dropless:
            state.tokens_per_expert = routing_map.sum(dim=0)
        else:
            self._exchange_counts(state)
        missing = state.num_padded_tokens - num_tokens
        if missing:
            hidden_states, probs, state.routing_map = (
                F.pad(tensor, (0, 0, 0, missing)) for tensor in (hidden_states, probs, routing_map)
            )
        return hidden_states, probs, state

    def _set_padded_counts(self, state: AllGatherState) -> None:
        """Counts of a map padded to capacity."""
        num_tokens, device = state.num_tokens, state.routing_map.device
        capacity = self.padded_capacity(num_tokens, device)
        per_expert = capacity * self.ep_size * self.etp_size
        state.num_rows = per_expert * self.num_local_experts
        state.host_tokens_per_expert = [per_expert] * self.num_local_experts
        state.tokens_per_expert = torch.full((self.num_local_experts,), per_expert, dtype=torch.int64, device=device)

    def _exchange_counts(self, state: AllGatherState) -> None:
        """Learn every rank's token count and the rows of the local experts. Host: one wait."""
        num_local, routing_map = self.num_local_experts, state.routing_map
        num_tokens = torch.full((1,), state.num_tokens, dtype=torch.int64, device=routing_map.device)
        local = torch.cat([routing_map.sum(dim=0), num_tokens])
        table = gather_rows(local.unsqueeze(0), self.expert_ranks_group)  # [W, E + 1]
        first = group_rank(self.ep_group) * num_local
        state.tokens_per_expert = table[:, first : first + num_local].sum(dim=0)
        values = HostCounts(torch.cat([state.tokens_per_expert, table[:, -1]])).wait()
        state.host_tokens_per_expert = values[:num_local]
        state.num_rows = sum(values[:num_local])
        state.num_padded_tokens = max(values[num_local:])

    def token_dispatch(
        self, rows: torch.Tensor, probs: torch.Tensor, state: AllGatherState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather hidden [P, h], probs [P, E] -> [W * P, h], [W * P, E]; the map is gathered into the state."""
        state.routing_map = gather_rows(state.routing_map.view(torch.uint8), self.expert_ranks_group).view(torch.bool)
        return gather_rows(rows, self.expert_ranks_group), gather_rows(probs, self.expert_ranks_group)

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor, state: AllGatherState
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keep the rows of local experts: [W * P, h], [W * P, E] -> rows [R, h], tokens_per_expert int64 [n], [R]."""
        first = group_rank(self.ep_group) * self.num_local_experts
        local = slice(first, first + self.num_local_experts)
        is_uniform = self.has_all_experts and self.is_dropless
        order = self.row_order(state.routing_map[:, local], state.num_rows, self.topk if is_uniform else None)
        state.order = order
        rows, row_probs = permute(rows, probs[:, local], order)
        assert state.tokens_per_expert is not None, "counts are set by dispatch_preprocess"
        return rows, state.tokens_per_expert, row_probs

    def combine_preprocess(self, rows: torch.Tensor, state: AllGatherState) -> torch.Tensor:
        """Add up the rows that local experts made for each token: [R, h] -> [W * P, h]."""
        assert state.order is not None, "combine before dispatch"
        return unpermute(rows, state.order, state.hidden_dtype)

    def token_combine(self, rows: torch.Tensor, state: AllGatherState) -> torch.Tensor:
        """Sum over the ranks, keeping this rank's tokens: [W * P, h] -> [P, h]."""
        return reduce_rows(rows, self.expert_ranks_group)

    def combine_postprocess(self, rows: torch.Tensor, state: AllGatherState) -> torch.Tensor:
        """Cut off padding: [P, h] -> [T, h]."""
        return rows[: state.num_tokens] if state.num_padded_tokens > state.num_tokens else rows
