"""The end of a residual branch: add the bias, drop, add the residual."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

BiasDropoutAdd = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, prob: float, training: bool
) -> torch.Tensor:
    """Return residual + dropout(x + bias).

    Shapes: x [s, b, h], bias [h], residual [s, b, h] -> [s, b, h].
    Dtype:  the wider of x and residual (an fp32 residual stream stays fp32).
    """
    if bias is not None:
        x = x + bias
    return residual + F.dropout(x, prob, training)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return the function for a layer spec: ((x [s, b, h], bias [h]), residual [s, b, h], prob) -> [s, b, h].

    `fused` asks for one kernel; plain PyTorch serves both values until there is one, with the same result.
    """
    del fused

    def apply(
        x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
    ) -> torch.Tensor:
        x, bias = x_with_bias
        return bias_dropout_add(x, bias, residual, prob, training)

    return apply
