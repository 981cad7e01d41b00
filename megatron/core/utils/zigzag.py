"""Which part of a sequence a context-parallel rank holds.

The sequence is cut in 2 * size equal chunks, and rank r holds chunks r and 2 * size - 1 - r, the early one first:

    chunk       0 1 2 3 4 5 6 7          size 4
    rank        0 1 2 3 3 2 1 0

Under a causal mask a late chunk has more keys to see than an early one; every such pair has the same number.

Legend: S whole sequence, P ranks.
"""

import torch


def own_chunks(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """Keep the chunks of one rank along `dim`: [..., S, ...] -> [..., S / P, ...]; a copy if P is above 1."""
    if size == 1:
        return tensor
    length = tensor.shape[dim]
    assert length % (2 * size) == 0, f"a length of {length} cannot be cut in {2 * size} equal chunks"
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def to_natural_order(parts: torch.Tensor) -> torch.Tensor:
    """Join the ranks' parts in the order of the sequence: [P, S / P, ...] -> [S, ...]."""
    early, late = parts.chunk(2, dim=1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)


def to_rank_order(sequence: torch.Tensor, size: int) -> torch.Tensor:
    """Undo `to_natural_order`: [S, ...] -> [P, S / P, ...]."""
    early, late = sequence.unflatten(0, (2, size, -1)).unbind()
    return torch.cat((early, late.flip(0)), dim=1)
