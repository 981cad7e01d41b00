"""Gated activation of an MLP whose first matrix yields [gate; up]: act(gate) * up. With act = silu this is SwiGLU."""

from collections.abc import Callable

import torch


def bias_glu(
    x: torch.Tensor, bias: torch.Tensor | None, activation: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return activation(gate) * up, where [gate; up] = x + bias. Shapes: x [..., 2f], bias [2f] -> [..., f]."""
    if bias is not None:
        x = x + bias
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up
