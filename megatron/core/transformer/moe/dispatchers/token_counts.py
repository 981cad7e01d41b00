"""How many rows go where: the arithmetic of the all-to-all dispatcher.

    local counts [W, n]   rows of this rank for each rank's experts       (column sums of the routing map)
    recv counts  [W, n]   rows that each source rank has for our experts  (one small exchange)
    recv table   [X * W, n]   the same of all shards of our experts       (with ETP, one small gather)

The host needs the sums over n to post the exchange. All of its numbers come in one read.

Legend: W ranks of the expert-parallel group, X ranks of the expert tensor-parallel group, n experts per rank,
E = W * n, T tokens.
"""

import dataclasses

import torch
import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.transformer.moe.dispatchers.exchange import exchange_counts, gather_rows
from megatron.core.transformer.moe.dispatchers.host_counts import HostCounts
from megatron.core.utils.collectives import all_reduce
from megatron.core.utils.groups import group_rank, group_size


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """Row counts of one microbatch."""

    send: list[int]
    """[W], rows sent to each rank."""

    recv: list[int]
    """[W], rows received from each rank."""

    shard_rows: list[int]
    """[X], rows that each shard of our experts received; all shards compute all of them."""

    tokens_per_expert: torch.Tensor
    """int64 [n] on the device, rows of each local expert."""

    recv_table: torch.Tensor
    """int64 [X * W, n] on the device, the same by source: shard by shard, within a shard rank by rank."""

    host_tokens_per_expert: list[int] | None
    """The rows of each local expert on the host, if they were read."""


class PendingCounts:
    """Counts of a data-dependent routing: started before the permutation, finished after it."""

    def __init__(
        self,
        routing_map: torch.Tensor,
        num_local_experts: int,
        group: dist.ProcessGroup | None,
        shard_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Count, exchange and start the read for a routing map bool [T, E]."""
        ranks, shards = group_size(group), group_size(shard_group)
        local = routing_map.sum(dim=0).view(ranks, num_local_experts)
        received = exchange_counts(local, group)
        self._table = gather_rows(received, shard_group)
        self._per_expert = self._table.sum(dim=0)
        self._sizes = [ranks, ranks, shards, num_local_experts]
        shard_rows = self._table.view(shards, -1).sum(dim=1)
        self._host = HostCounts(torch.cat([local.sum(dim=1), received.sum(dim=1), shard_rows, self._per_expert]))

    def wait(self) -> RowCounts:
        """Return the counts. Host: one wait."""
        values = self._host.wait()
        pieces = []
        for size in self._sizes:
            pieces.append(values[:size])
            values = values[size:]
        send, recv, shard_rows, per_expert = pieces
        return RowCounts(send, recv, shard_rows, self._per_expert, self._table, per_expert)


def constant_counts(
    rows_per_expert: int,
    num_local_experts: int,
    group: dist.ProcessGroup | None,
    shard_group: dist.ProcessGroup | None,
    device: torch.device,
) -> RowCounts:
    """Counts of a routing that gives every expert the same number of rows of every rank. Host: no synchronisation."""
    ranks, shards = group_size(group), group_size(shard_group)
    table = torch.full((shards * ranks, num_local_experts), rows_per_expert, dtype=torch.int64, device=device)
    splits = [rows_per_expert * num_local_experts] * ranks
    per_expert = [rows_per_expert * ranks * shards] * num_local_experts
    return RowCounts(splits, splits, [sum(splits)] * shards, table.sum(dim=0), table, per_expert)


def local_counts(routing_map: torch.Tensor, num_rows: int, multiple: int = 1) -> RowCounts:
    """Counts of a dropless routing map bool [T, E] whose experts are all on this rank. Host: no synchronisation.

    The rows of each expert are padded to the multiple; with them the number of rows is a bound that always holds.
    """
    per_expert = (routing_map.sum(dim=0) + multiple - 1) // multiple * multiple
    num_rows += routing_map.shape[1] * (multiple - 1)
    num_rows += -num_rows % multiple
    return RowCounts([num_rows], [num_rows], [num_rows], per_expert, per_expert.unsqueeze(0), None)


def require_equal_tokens(num_tokens: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Refuse a padded exchange between ranks with different token counts, before it could hang; returns the count.

    Every expert is padded to a capacity that each rank derives from its own tokens: all ranks need equally many.
    Collective; the host waits for it.
    """
    values = _all_token_counts(num_tokens, group, device)
    if len(set(values)) > 1:
        raise ConfigError(
            f"rank {group_rank(group)} of the expert ranks: moe_pad_expert_input_to_capacity=True with "
            f"tokens per rank {values}: a padded exchange needs the same number on all ranks; give every rank equally "
            "many tokens, or drop --moe-pad-expert-input-to-capacity."
        )
    return num_tokens


def most_tokens(num_tokens: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The tokens of the rank that has most. Collective; the host waits for it."""
    return max(_all_token_counts(num_tokens, group, device))


def _all_token_counts(num_tokens: int, group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    if group_size(group) == 1:
        return [num_tokens]
    counts = torch.zeros(group_size(group), dtype=torch.int64, device=device)
    counts[group_rank(group)] = num_tokens
    all_reduce(counts, group)
    return counts.tolist()
