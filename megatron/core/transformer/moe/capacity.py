"""Expert capacity: which (token, expert) pairs survive when an expert may take only C tokens of a rank.

    C = ceil(T * k / E * factor)        T tokens on this rank, padding of the sequence included

Dropped pairs contribute zero and the weights of the remaining ones are not renormalised; the residual stream carries
the token. With padding every expert gets exactly min(C, T) rows: places left over are filled with tokens that did not
choose it, at probability zero, so that all shapes are static.

Legend: T tokens, E experts, k experts per token, C capacity.
"""

import math
from typing import Literal

import torch

DropPolicy = Literal["probs", "position"]


def expert_capacity(num_pairs: int, num_experts: int, factor: float) -> int:
    """Capacity of one expert on this rank, for `num_pairs` = T * k routed pairs."""
    return math.ceil((num_pairs / num_experts) * factor)


def apply_capacity(
    probs: torch.Tensor, routing_map: torch.Tensor, capacity: int, policy: DropPolicy, is_padded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop what exceeds the capacity: probs [T, E], map bool [T, E] -> the same two, pruned.

    `probs` keeps the highest weights of a column, `position` the earliest tokens; equal weights are kept in token
    order. With `is_padded` the map has exactly min(capacity, T) entries in each column.
    Host: no synchronisation.
    """
    if policy == "probs":
        # unchosen pairs come after chosen ones, even after a chosen pair whose weight is zero
        preference = probs.detach().masked_fill(~routing_map, -1.0)
    else:
        preference = routing_map.to(torch.uint8)
    kept = preference.sort(dim=0, descending=True, stable=True).indices[:capacity]  # [min(C, T), E]
    mask = torch.zeros_like(routing_map).scatter_(0, kept, True)
    pruned = mask if is_padded else mask & routing_map
    return probs * pruned, pruned
