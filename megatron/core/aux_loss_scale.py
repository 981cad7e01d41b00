"""Auxiliary losses that are not part of the objective, and the factor that their gradients carry.

A balancing loss is not added to the language-model loss: `attach` lets it ride on an activation. Forward it is the
identity; backward it hands the activation's gradient on and starts the auxiliary loss with gradient `scale`:

    probs = attach(probs, aux_loss)          d(total)/d(aux_loss) = scale

The schedule sets the scale before the backward pass of a microbatch; it alone knows the number M of microbatches:

    mean of microbatch means   scale = loss_scale * CP / M      (gradients are averaged over DP * CP later)
    per-token loss             scale = loss_scale               (gradients are divided by the token count later)

Attach a loss once per forward pass, and only while gradients are enabled.
"""

from typing import Any

import torch


class _Scale:
    """The one scale of this process."""

    def __init__(self) -> None:
        self.value: torch.Tensor | float = 1.0


_SCALE = _Scale()


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, aux_loss: torch.Tensor) -> torch.Tensor:
        ctx.aux_shape, ctx.aux_dtype, ctx.aux_device = aux_loss.shape, aux_loss.dtype, aux_loss.device
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = _SCALE.value
        if not isinstance(scale, torch.Tensor):
            scale = torch.full((), scale, dtype=ctx.aux_dtype, device=ctx.aux_device)
        return grad, scale.to(ctx.aux_device, ctx.aux_dtype).expand(ctx.aux_shape)


def attach(activation: torch.Tensor, aux_loss: torch.Tensor) -> torch.Tensor:
    """Return `activation` [any] unchanged; in backward `aux_loss` [any] starts with gradient ones * scale."""
    return _Attach.apply(activation, aux_loss)


def set_aux_loss_scale(scale: torch.Tensor | float) -> None:
    """Set the factor that backward passes from now on use; a tensor is read then, not now."""
    _SCALE.value = scale


def get_aux_loss_scale() -> torch.Tensor | float:
    """Return the factor in use."""
    return _SCALE.value


def reset() -> None:
    """Go back to a factor of one."""
    _SCALE.value = 1.0
