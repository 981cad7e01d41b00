"""Activation of an expert, weighted by the routing probability of each row:  act(x) * p,  gated: act(gate) * up * p.

The product is formed in the wider of activation and probability, fp32 at least, and rounded once at the end, so that
the probability is never rounded to bf16. For SiLU the gated form (SwiGLU) has a backward of its own, which keeps the
input and the probabilities instead of three intermediate tensors; on a GPU it is a kernel, see `fused_swiglu`:

    d p    = sum_f dy * act(gate) * up
    d up   = dy * p * act(gate)
    d gate = dy * p * up * act'(gate)

Legend: R rows, f inner width of an expert.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_swiglu import (
    fused_swiglu,
    has_swiglu_kernel,
    kernel_swiglu,
    kernel_swiglu_backward,
)
from megatron.core.utils.upcast import upcast, wide_dtype


def weighted_activation(
    x: torch.Tensor,
    probs: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor],
    is_gated: bool,
    fuses: bool = True,
) -> torch.Tensor:
    """Return act(x) * p in the dtype of x; `fuses` lets a kernel do it where there is one.

    Shapes: x [R, f], gated [gate; up] [R, 2f]; probs [R], None for ones -> [R, f].
    """
    is_swiglu = is_gated and activation is F.silu
    if is_swiglu and fuses and has_swiglu_kernel(x, None, probs):
        return fused_swiglu(x, None, probs)
    if is_swiglu:
        return _WeightedSwiglu.apply(x, _or_ones(probs, x))
    probs = _or_ones(probs, x)
    wide = upcast(x)
    if is_gated:
        gate, up = wide.chunk(2, dim=-1)
        inner = activation(gate) * up
    else:
        inner = activation(wide)
    return (inner * upcast(probs).unsqueeze(-1)).to(x.dtype)


def weighted_swiglu(x: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    """Return silu(gate) * up * p without a graph for gradients: x [R, 2f], probs [R] or None for ones -> [R, f]."""
    if has_swiglu_kernel(x, None, probs):
        return kernel_swiglu(x, None, probs)
    return _plain_swiglu(x, _or_ones(probs, x))


def weighted_swiglu_backward(
    grad: torch.Tensor, x: torch.Tensor, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of x [R, 2f] and probs [R], None where there are none, for that of the result, grad [R, f]."""
    if has_swiglu_kernel(x, None, probs):
        return kernel_swiglu_backward(grad, x, None, probs)
    grad_x, grad_probs = _plain_swiglu_backward(grad, x, _or_ones(probs, x))
    return grad_x, None if probs is None else grad_probs


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, probs)
        return _plain_swiglu(x, probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _plain_swiglu_backward(grad, *ctx.saved_tensors)


def _plain_swiglu(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Torch's operations: x [R, 2f], probs [R] -> [R, f]."""
    gate, up = upcast(x).chunk(2, dim=-1)
    return F.silu(gate).mul_(up).mul_(upcast(probs).unsqueeze(-1)).to(x.dtype)


def _plain_swiglu_backward(
    grad: torch.Tensor, x: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [R, 2f] and probs [R] for grad [R, f]."""
    gate, up = upcast(x).chunk(2, dim=-1)
    weight, grad = upcast(probs).unsqueeze(-1), upcast(grad)
    grad_x = torch.empty_like(x, dtype=gate.dtype)
    grad_gate, grad_up = grad_x.chunk(2, dim=-1)
    activated, inner = F.silu(gate), grad * up
    grad_probs = (inner * activated).sum(dim=-1).to(probs.dtype)
    torch.mul(activated.mul_(weight), grad, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(inner.mul_(weight), gate, grad_input=grad_gate)
    return grad_x.to(x.dtype), grad_probs


def _or_ones(probs: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Probs [R], or ones for the rows of x [R, ...]."""
    return x.new_ones(x.shape[0], dtype=wide_dtype(x.dtype)) if probs is None else probs
