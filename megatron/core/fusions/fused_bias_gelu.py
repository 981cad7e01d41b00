"""GELU after a bias, in the tanh form:  gelu(y) = y/2 * (1 + tanh(sqrt(2/pi) * (y + 0.044715 y^3))).

Megatron's fused kernel computes this form, its unfused path the exact one with erf; runs that compare losses need both.
"""

import torch
import torch.nn.functional as F


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x + bias), tanh form. Shapes: x [..., f], bias [f] -> [..., f]."""
    return F.gelu(x + bias, approximate="tanh")
