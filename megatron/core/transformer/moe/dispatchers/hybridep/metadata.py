"""What one exchange knows about its routing, and the sizes that follow from it.

The router's map bool [T, E] becomes *slots*: for each token the global ids of its experts, ascending, -1 behind them.
With expert tensor parallelism an expert has X shards on X ranks and a token chooses all of them, so ids number shards:
id = (rank of the shard in the group) * n + (expert on that rank), and `id // n` is the destination.

    map   [1 0 1 0 | 0 0 0 1]      ids   [0 2 7 -1]      destinations  0 0 1 -

Legend: T tokens of this rank, N tokens of the rank that has most, K slots of a token, h width, E experts, X shards of
each, W ranks of the group (expert times expert tensor parallel), n experts on each, P rows at this rank's experts.
"""

import dataclasses
import math
from typing import Any

import torch


@dataclasses.dataclass(kw_only=True)
class Exchange:
    """One microbatch of one layer, from preprocess to the last backward: tensors on the device, no gradient.

    Its life is that of the `DispatchState` that holds it, which outlives every kernel that reads these tensors.
    """

    expert_ids: torch.Tensor
    """int32 [T, K], ascending in each row, -1 = no expert."""

    max_tokens: int | None = None
    """N as agreed by the group; None: ranks bring what they bring, and the engine learns it with the counts."""

    row_budget: int | None = None
    """Rows of the output under a static budget; None: exactly as many as arrive, which the host must learn."""

    num_rows: int | None = None
    """P; set by the first dispatch."""

    tokens_per_expert: torch.Tensor | None = None
    """int64 [n], rows of each local expert, padding included, cut off at the budget; set by the first dispatch."""

    host_tokens_per_expert: list[int] | None = None
    """The same on the host; only without a budget."""

    dropped_rows: torch.Tensor | None = None
    """int64 [1], rows that found no place in the budget; set by the first dispatch, None without a budget."""

    saved: Any = None
    """What the engine keeps for combine and for the backward of both; nobody else looks at it."""

    @property
    def num_tokens(self) -> int:
        """T"""
        return self.expert_ids.shape[0]

    @property
    def is_static(self) -> bool:
        """True if no shape depends on the routing."""
        return self.row_budget is not None


def expand_to_shards(per_expert: torch.Tensor, num_local_experts: int, num_shards: int) -> torch.Tensor:
    """Repeat the column of each expert for its shards: [T, E] -> [T, E * X], columns rank by rank of the group."""
    if num_shards == 1:
        return per_expert
    by_rank = per_expert.unflatten(1, (-1, 1, num_local_experts))  # [T, E / n, 1, n]
    return by_rank.expand(-1, -1, num_shards, -1).flatten(1)


def round_up(count: int, multiple: int) -> int:
    """Smallest multiple that is not below `count`."""
    return math.ceil(count / multiple) * multiple


def row_budget(max_tokens: int, slots_per_token: int, factor: float, num_local_experts: int, row_multiple: int) -> int:
    """Rows for `factor` times a balanced load, which is N * K rows per rank, and for the padding of each expert."""
    padding = num_local_experts * (row_multiple - 1)
    return round_up(math.ceil(max_tokens * slots_per_token * factor) + padding, row_multiple)


def worst_case_rows(
    max_tokens: int, slots_per_token: int, num_ranks: int, num_local_experts: int, row_multiple: int
) -> int:
    """Rows that suffice for every routing: all N tokens of all ranks choose as many of our experts as they can."""
    rows = max_tokens * num_ranks * min(slots_per_token, num_local_experts)
    return round_up(rows + num_local_experts * (row_multiple - 1), row_multiple)
