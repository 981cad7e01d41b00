"""What an exchange between W ranks gives, from its definition, in one process: the reference for engines.

Loops over the ranks and plain tensor operations stand for all communication. Sums run as documented in
`dispatchers/hybridep/engine.py`: a rank's rows of a token in fp32 in the order of experts, rounded; then in fp32 in the
order of ranks.

Legend: T tokens of a rank, K slots, h width, W ranks, n experts on each, P rows at a rank's experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class LocalExchange:
    """The routing of all ranks and where each rank's rows lie."""

    expert_ids: list[torch.Tensor]
    """int32 [T, K] of each rank"""

    num_local_experts: int
    row_multiple: int = 1
    row_budget: int | None = None

    def __post_init__(self) -> None:
        self.slot_rows = [[self._empty(ids) for ids in self.expert_ids] for _ in self.expert_ids]
        """[destination][source]: int64 [T, K], row of each slot, -1 if elsewhere or dropped"""
        layouts = [self._lay_out(rank) for rank in range(len(self.expert_ids))]
        self.num_rows = [rows for rows, _, _ in layouts]
        self.tokens_per_expert = [counts for _, counts, _ in layouts]
        self.dropped_rows = [dropped for _, _, dropped in layouts]

    @staticmethod
    def _empty(ids: torch.Tensor) -> torch.Tensor:
        return torch.full(ids.shape, -1, dtype=torch.int64, device=ids.device)

    def _lay_out(self, rank: int) -> tuple[int, list[int], int]:
        """Number the rows of one rank by expert, source, token; returns their number, those per expert, the dropped."""
        begin, counts, dropped = 0, [], 0
        limit = self.row_budget if self.row_budget is not None else 2**62
        for expert in range(rank * self.num_local_experts, (rank + 1) * self.num_local_experts):
            end = begin
            for source, ids in enumerate(self.expert_ids):
                chosen = (ids == expert).nonzero()  # ordered by token, one slot each
                rows = end + torch.arange(len(chosen), device=ids.device)
                is_kept = rows < limit
                self.slot_rows[rank][source][chosen[is_kept, 0], chosen[is_kept, 1]] = rows[is_kept]
                dropped += int((~is_kept).sum())
                end += len(chosen)
            padded = begin + -(-(end - begin) // self.row_multiple) * self.row_multiple
            counts.append(min(padded, limit) - min(begin, limit))
            begin = padded
        return begin if self.row_budget is None else self.row_budget, counts, dropped

    def unused_rows(self) -> list[torch.Tensor]:
        """bool [P] of each rank, rows that no token fills."""
        masks = []
        for rank, sources in enumerate(self.slot_rows):
            is_unused = torch.ones(self.num_rows[rank], dtype=torch.bool, device=self.expert_ids[0].device)
            for slot_rows in sources:
                is_unused[slot_rows[slot_rows >= 0]] = False
            masks.append(is_unused)
        return masks

    def dispatch(
        self, hidden: list[torch.Tensor], probs: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Hidden [T, h], probs [T, K] of each rank -> rows [P, h], row probs [P]; what no token fills is zero."""
        results = []
        for rank, sources in enumerate(self.slot_rows):
            rows = hidden[0].new_zeros(self.num_rows[rank], hidden[0].shape[1])
            row_probs = probs[0].new_zeros(self.num_rows[rank])
            for source, slot_rows in enumerate(sources):
                tokens, slots = (slot_rows >= 0).nonzero(as_tuple=True)
                targets = slot_rows[tokens, slots]
                rows[targets], row_probs[targets] = hidden[source][tokens], probs[source][tokens, slots]
            results.append((rows, row_probs))
        return results

    def combine(
        self, rows: list[torch.Tensor], row_probs: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rows [P, h], row probs [P] of each rank -> hidden [T, h], probs [T, K]."""
        results = []
        for source, ids in enumerate(self.expert_ids):
            wide = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
            hidden = torch.zeros(len(ids), rows[0].shape[1], dtype=wide, device=ids.device)
            probs = row_probs[0].new_zeros(ids.shape)
            for rank, sources in enumerate(self.slot_rows):
                partial = torch.zeros_like(hidden)
                for slot in range(ids.shape[1]):
                    tokens = (sources[source][:, slot] >= 0).nonzero().flatten()
                    targets = sources[source][tokens, slot]
                    partial[tokens] += rows[rank][targets].to(wide)
                    probs[tokens, slot] = row_probs[rank][targets]
                hidden += partial.to(rows[0].dtype).to(wide)
            results.append((hidden.to(rows[0].dtype), probs))
        return results
