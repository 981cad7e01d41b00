"""The all-to-all dispatcher: each row travels to the rank of its expert, once per chosen expert.

    rank 0  rows for [e0 e1 | e2 e3] --+-- all-to-all --> [from 0: e0 e1 | from 1: e0 e1] --sort--> [e0 e0 | e1 e1]
    rank 1  rows for [e0 e1 | e2 e3] --+-- all-to-all --> [from 0: e2 e3 | from 1: e2 e3] --sort--> [e2 e2 | e3 e3]

With expert tensor parallelism (ETP) rank r of every ETP group exchanges with the ranks r of the others. The shards of
an expert then give each other the rows that each received, and combine adds up their results before rows travel back.

Rows at the experts are ordered by expert, then source (ETP rank, EP rank), then token. Row counts differ from rank to
rank, zero included. With one expert per rank there is nothing to sort: the experts read the received rows themselves.

Host: one wait per layer for the row counts; none if every expert is padded to its capacity, or if all experts are on
this rank and nothing is dropped.

Legend: T tokens, h width, E experts, n experts per rank, W ranks, S rows sent, R rows at the experts of this rank.
"""

import dataclasses
from collections.abc import Sequence

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fp8.layer_state import expert_row_multiple
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.dispatchers.exchange import exchange_rows, gather_uneven_rows, reduce_uneven_rows
from megatron.core.transformer.moe.dispatchers.token_counts import (
    PendingCounts,
    RowCounts,
    constant_counts,
    local_counts,
)
from megatron.core.transformer.moe.permute import (
    FusedRowOrder,
    RowOrder,
    RowShuffle,
    permute,
    regroup_by_expert,
    unpermute,
)
from megatron.core.transformer.moe.token_dispatcher import DispatcherTraits, DispatchState, MoETokenDispatcher


@dataclasses.dataclass(kw_only=True)
class AllToAllState(DispatchState):
    """One microbatch of one layer."""

    order: RowOrder | FusedRowOrder
    """Which token each sent row carries."""

    counts: RowCounts
    """Rows per rank and per expert."""

    shuffle: RowShuffle | None
    """From arrival order to expert order; None if they are the same."""


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Sends rows with `all_to_all_single` over the expert-parallel group."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        if self._is_local and config.moe_permute_fusion and not self.has_row_budget:
            self.row_multiple = expert_row_multiple(config)

    @property
    def traits(self) -> DispatcherTraits:
        """Traits in this configuration."""
        return DispatcherTraits(
            host_sync_free=self.is_padded or self._is_local,
            static_shapes=self.is_padded or self._is_local,
            deduplicates=False,
            postprocess_aliases_input=self._is_sorted_on_arrival,
            fuses_permute=False,
            overlaps_shared_experts=False,
            supports_capacity=True,
            probs_dtype=self.probs_dtype,
        )

    @property
    def _is_local(self) -> bool:
        """True if all rows stay here: their number is known, and the permutation may pad each expert's."""
        return self.has_all_experts and self.is_dropless

    @property
    def _is_sorted_on_arrival(self) -> bool:
        return self.has_all_experts or self.num_local_experts == 1

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, AllToAllState]:
        """Hidden [T, h], map bool [T, E], probs [T, E] -> rows [S, h], probs [S], state."""
        num_tokens = hidden_states.shape[0]
        pending = None
        if self.is_padded:
            counts = self._padded_counts(num_tokens, routing_map.device)
        elif self._is_local:
            counts = local_counts(routing_map, num_tokens * self.topk, self.row_multiple)
        else:
            pending = PendingCounts(routing_map, self.num_local_experts, self.ep_group, self.etp_group)
            counts = None if self.is_dropless else pending.wait()
        num_rows = num_tokens * self.topk if counts is None else sum(counts.send)
        order = self.row_order(routing_map, num_rows, self.topk if self.is_dropless else None)
        rows, row_probs = permute(hidden_states, probs, order)
        if counts is None:
            assert pending is not None, "neither counts nor a read under way"
            counts = pending.wait()
        shuffle = None
        if not self._is_sorted_on_arrival:
            is_fused = self.config.moe_permute_fusion
            shuffle = regroup_by_expert(counts.recv_table, sum(counts.shard_rows), is_fused=is_fused)
        state = AllToAllState(
            num_tokens=num_tokens,
            hidden_dtype=hidden_states.dtype,
            tokens_per_expert=counts.tokens_per_expert,
            host_tokens_per_expert=counts.host_tokens_per_expert,
            order=order,
            counts=counts,
            shuffle=shuffle,
        )
        return rows, row_probs, state

    def _padded_counts(self, num_tokens: int, device: torch.device) -> RowCounts:
        """Counts of a map padded to capacity."""
        capacity = self.padded_capacity(num_tokens, device)
        return constant_counts(capacity, self.num_local_experts, self.ep_group, self.etp_group, device)

    def token_dispatch(
        self, rows: torch.Tensor, probs: torch.Tensor, state: AllToAllState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange rows [S, h] and probs [S] -> [R, h], [R], ordered by shard of the experts, then source rank."""
        return self._to_experts(rows, state.counts), self._to_experts(probs, state.counts)

    def _to_experts(self, rows: torch.Tensor, counts: RowCounts) -> torch.Tensor:
        """Send [S, ...] to the ranks of the experts, then give all shards what each received -> [R, ...]."""
        received = exchange_rows(rows, counts.send, counts.recv, self.ep_group)
        return gather_uneven_rows(received, counts.shard_rows, self.etp_group)

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor, state: AllToAllState
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort rows [R, h], probs [R] by expert -> rows [R, h], tokens_per_expert int64 [n], probs [R]."""
        if state.shuffle is not None:
            rows, probs = state.shuffle.apply(rows), state.shuffle.apply(probs)
        return rows, state.counts.tokens_per_expert, probs

    def combine_preprocess(self, rows: torch.Tensor, state: AllToAllState) -> torch.Tensor:
        """Back to the order of arrival: [R, h] -> [R, h]."""
        return rows if state.shuffle is None else state.shuffle.undo(rows)

    def token_combine(self, rows: torch.Tensor, state: AllToAllState) -> torch.Tensor:
        """Add up what the shards made of each row, send rows [R, h] back to their source ranks -> [S, h]."""
        rows = reduce_uneven_rows(rows, state.counts.shard_rows, self.etp_group)
        return exchange_rows(rows, state.counts.recv, state.counts.send, self.ep_group)

    def combine_postprocess(self, rows: torch.Tensor, state: AllToAllState) -> torch.Tensor:
        """Add up the rows [S, h] of each token -> [T, h]."""
        return unpermute(rows, state.order, state.hidden_dtype)
