"""The engine on `all_to_all_single`: any device and any network, and the reference for the other engines.

    dispatch   send buffer [S, h], by destination  --all-to-all-->  copies [C, h], by source  --gather-->  rows [P, h]
    combine    hidden [T, h]  <--sum over ranks--  [S, h]  <--all-to-all--  [C, h]  <--sum over experts--  rows [P, h]

Two row layouts describe all of it: the copies of this rank's tokens, laid out by destination rank, and the rows of the
copies that arrived, laid out by expert. With a copy travel the token's expert ids and probabilities.

Exact sizes: ranks tell each other how many copies and rows to expect, and the host reads its numbers once. Under a row
budget every pair of ranks exchanges N copies, those that nobody wants being zeros: more bytes, no host.

Legend: T tokens, N tokens of the rank that has most, K slots, h width, W ranks, n experts on each, S copies sent,
C copies received, P rows at this rank's experts.
"""

import dataclasses

import torch

from megatron.core.fusions.fused_permute import gather_rows, sum_rows
from megatron.core.fusions.fused_row_layout import RowLayout, row_layout
from megatron.core.transformer.moe.dispatchers.exchange import exchange_counts, exchange_rows
from megatron.core.transformer.moe.dispatchers.host_counts import HostCounts
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup, HybridEPEngine
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange, round_up


@dataclasses.dataclass
class Routes:
    """Both ends of an exchange."""

    ranks: torch.Tensor
    """int64 [T, K], destination of each slot, W for an empty one."""

    copies: RowLayout
    """Copies of this rank's tokens by destination; a slot has one if it is the token's first with its destination."""

    send: list[int] = dataclasses.field(default_factory=list)
    """[W], copies sent to each rank."""

    recv: list[int] = dataclasses.field(default_factory=list)
    """[W], copies that arrive from each rank."""

    arrived: RowLayout | None = None
    """Rows of the copies that arrived, by expert."""


class CollectiveEngine(HybridEPEngine):
    """Moves copies with torch.distributed."""

    packs_rows = True

    @classmethod
    def why_unavailable(cls, setup: EngineSetup) -> str | None:
        """Runs everywhere."""
        return None

    def reads_counts(self, is_static: bool) -> bool:
        """The sizes of an exact exchange are read on the host."""
        return not is_static

    def prepare(self, exchange: Exchange) -> None:
        """Lay out the copies of this rank's tokens by destination rank."""
        num_ranks, ids = self.setup.num_ranks, exchange.expert_ids
        ranks = ids.div(self.setup.num_local_experts, rounding_mode="floor").long().masked_fill(ids < 0, num_ranks)
        is_first = torch.ones_like(ranks, dtype=torch.bool)
        is_first[:, 1:] = ranks[:, 1:] != ranks[:, :-1]
        first_of_rank = ranks.masked_fill(~is_first, num_ranks)  # ids outside 0 .. W - 1 take no copy
        if exchange.is_static:
            size = self._static_size(exchange)
            copies = row_layout(first_of_rank, num_ranks, num_ranks * size, size, pads_empty=True)
        else:
            most = exchange.num_tokens * min(ids.shape[1], num_ranks)
            copies = row_layout(first_of_rank, num_ranks, most, has_tail=True)
        exchange.saved = Routes(ranks, copies)

    @staticmethod
    def _static_size(exchange: Exchange) -> int:
        """Copies between each pair of ranks under a row budget."""
        assert exchange.max_tokens is not None, "a static exchange needs the agreed number of tokens"
        return max(exchange.max_tokens, 1)

    def dispatch(
        self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden [T, h], probs [T, K] or None -> rows [P, h], row probs [P] or None."""
        routes: Routes = exchange.saved
        if routes.arrived is None:
            self._learn_sizes(exchange, routes)
            self._lay_out_rows(exchange, routes)
        assert routes.arrived is not None, "no rows are laid out"
        received = self._send(hidden, routes)
        received_probs = None if probs is None else self._send(probs, routes)
        layout = routes.arrived
        return gather_rows(received, received_probs, layout.pairs, layout.slots_per_token, has_tail=layout.has_tail)

    def _learn_sizes(self, exchange: Exchange, routes: Routes) -> None:
        """Fill in the copies per rank and the rows of this rank. Host: one wait without a budget, none with one."""
        setup = self.setup
        if exchange.is_static:
            routes.send = routes.recv = [self._static_size(exchange)] * setup.num_ranks
            exchange.num_rows = exchange.row_budget
            return
        ids = exchange.expert_ids.flatten().long()
        num_experts = setup.num_ranks * setup.num_local_experts
        per_expert = ids.new_zeros(num_experts + 1).scatter_add_(0, ids % (num_experts + 1), torch.ones_like(ids))
        by_rank = per_expert[:-1].view(setup.num_ranks, -1)  # an empty slot, -1, is counted in the last place
        sent = torch.cat([by_rank, routes.copies.tokens_per_expert.unsqueeze(1)], dim=1)  # [W, n + 1]
        received = exchange_counts(sent, setup.group)
        values = HostCounts(torch.cat([sent[:, -1], received[:, -1], received[:, :-1].sum(dim=0)])).wait()
        routes.send, routes.recv = values[: setup.num_ranks], values[setup.num_ranks : 2 * setup.num_ranks]
        rows = [round_up(count, setup.row_multiple) for count in values[2 * setup.num_ranks :]]
        exchange.host_tokens_per_expert, exchange.num_rows = rows, sum(rows)

    def _lay_out_rows(self, exchange: Exchange, routes: Routes) -> None:
        """Send each copy's expert ids along, numbered as on its destination, and lay out what arrives."""
        num_local, num_slots = self.setup.num_local_experts, exchange.expert_ids.shape[1]
        pairs = routes.copies.pairs[: sum(routes.send)].long()
        ids, ranks = exchange.expert_ids, routes.ranks
        if ids.numel():
            token = pairs.clamp(min=0) // num_slots
            first = ranks.flatten()[pairs.clamp(min=0)] * num_local
            local = ids[token] - first.unsqueeze(1)  # experts of other ranks lie outside 0 .. n - 1
            local = local.masked_fill((pairs < 0).unsqueeze(1), -1).int()
        else:
            local = ids.new_full((len(pairs), num_slots), -1)
        arrived = exchange_rows(local, routes.send, routes.recv, self.setup.group)
        assert exchange.num_rows is not None, "no sizes are known"
        layout = row_layout(arrived, num_local, exchange.num_rows, self.setup.row_multiple, has_tail=exchange.is_static)
        routes.arrived, exchange.tokens_per_expert = layout, layout.tokens_per_expert
        if exchange.is_static:
            exchange.dropped_rows = layout.dropped_rows

    def _send(self, tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Copies of tokens [T, m] to their destinations -> what arrived here [C, m]."""
        pairs = routes.copies.pairs[: sum(routes.send)]
        copies, _ = gather_rows(tokens, None, pairs, routes.copies.slots_per_token)
        return exchange_rows(copies, routes.send, routes.recv, self.setup.group)

    def combine(
        self, exchange: Exchange, rows: torch.Tensor, row_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [P, h], row probs [P] or None -> hidden [T, h], probs [T, K] or None."""
        routes: Routes = exchange.saved
        assert routes.arrived is not None, "combine before dispatch"
        sums, probs = sum_rows(rows, row_probs, routes.arrived.slots, rows.dtype)
        returned = exchange_rows(sums, routes.recv, routes.send, self.setup.group)
        hidden, _ = sum_rows(returned, None, routes.copies.slots, rows.dtype)
        if probs is None:
            return hidden, None
        returned_probs = exchange_rows(probs, routes.recv, routes.send, self.setup.group)
        return hidden, self._slot_probs(exchange, routes, returned_probs)

    @staticmethod
    def _slot_probs(exchange: Exchange, routes: Routes, returned: torch.Tensor) -> torch.Tensor:
        """Each slot's probability from the copy of its rank: returned [S, K] -> [T, K]."""
        ids, slots = exchange.expert_ids, routes.copies.slots
        if not returned.numel():  # no token of this rank has an expert
            return returned.new_zeros(ids.shape)
        places = torch.arange(ids.shape[1], device=ids.device)
        first = torch.where(slots >= 0, places, 0).cummax(dim=1).values  # the slot that holds the copy of this rank
        copies = slots.gather(1, first).clamp(min=0).long()
        return returned.flatten()[copies * ids.shape[1] + places].masked_fill(ids < 0, 0)
