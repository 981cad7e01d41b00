"""Rotary position embedding: pairs of a head's channels are turned by an angle that grows with the position.

    (a, b) -> (a cos - b sin, b cos + a sin)

A pair is channel i and i + d/2 (halves), or channel 2i and 2i + 1 (interleaved). Only the first d channels of a head
are turned, the others pass.

Legend: s sequence, b batch, n heads, c channels of a head, d turned channels.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RotaryTables:
    """cos and sin of all angles in the dtype of the queries, each [s, 1, 1, d]."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def from_angles(cls, angles: torch.Tensor, dtype: torch.dtype) -> "RotaryTables":
        """Build both tables from angles [s, 1, 1, d]; they are rounded to `dtype` at the end only."""
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rotary(t: torch.Tensor, tables: RotaryTables, interleaved: bool = False) -> torch.Tensor:
    """Turn the first d channels of each head. Shapes: t [s, b, n, c] -> [s, b, n, c]."""
    turned_size = tables.cos.shape[-1]
    if turned_size == t.shape[-1]:
        return _turn(t, tables, interleaved)
    turned, passed = t[..., :turned_size], t[..., turned_size:]
    return torch.cat((_turn(turned, tables, interleaved), passed), dim=-1)


def _turn(t: torch.Tensor, tables: RotaryTables, interleaved: bool) -> torch.Tensor:
    if interleaved:
        pairs = t.unflatten(-1, (-1, 2))
        partner = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    else:
        first, second = t.chunk(2, dim=-1)
        partner = torch.cat((-second, first), dim=-1)
    return torch.addcmul(t * tables.cos, partner, tables.sin)
