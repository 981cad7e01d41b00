"""Gated activation of an MLP whose first matrix yields [gate; up]: act(gate) * up. With act = silu this is SwiGLU.

The plain form rounds after each operation. On a GPU SwiGLU is a kernel that computes in fp32 and rounds once, see
`fused_swiglu`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_swiglu import fused_swiglu, has_swiglu_kernel


def bias_glu(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor],
    fuses: bool = True,
) -> torch.Tensor:
    """Return activation(gate) * up, where [gate; up] = x + bias; `fuses` lets a kernel do it where there is one.

    Shapes: x [..., 2f], bias [2f] -> [..., f].
    """
    if fuses and activation is F.silu and has_swiglu_kernel(x, bias, None):
        return fused_swiglu(x, bias, None)
    if bias is not None:
        x = x + bias
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up
