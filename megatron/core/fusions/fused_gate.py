"""A product of bf16 operands that keeps fp32: y = x W^T without widening x and W in memory.

A product of two bf16 numbers is exact in fp32, so tensor cores that add in fp32 give what the widened product gives, up
to the order of the sum. Backward the gradient dy is fp32. It goes in as two bf16 numbers, high = bf16(dy) and
low = bf16(dy - high), which hold 16 bits of it, twice as many as the bf16 gradients that come out:

    dx = [high | low] [W ; W]             dW = high^T x + low^T x             each summed in fp32, rounded once

Legend: T rows, i inputs, o outputs.
"""

from typing import Any

import torch

from megatron.core.utils.upcast import upcast


def uses_wide_products(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if `wide_linear` may stand for the product in `dtype`: x [..., i], weight [o, i], bf16 on a GPU, to fp32."""
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply bf16 x [..., i] by bf16 weight [o, i] -> fp32 [..., o].

    Memory: keeps `x` and `weight` as they are.
    Grad:   bf16, from an fp32 gradient [..., o].
    """
    return _WideLinear.apply(x, weight)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad_outputs[0].reshape(-1, weight.shape[0])
        high = grad.to(x.dtype)
        halves = torch.cat([high, (grad - high).to(x.dtype)], dim=1)  # [T, 2o]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = halves.matmul(weight.repeat(2, 1)).view(x.shape)
        if ctx.needs_input_grad[1]:
            parts = _product(halves.t(), x.reshape(-1, x.shape[-1]))  # [2o, i]
            grad_weight = parts.view(2, *weight.shape).sum(dim=0).to(weight.dtype)
        return grad_x, grad_weight


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A [m, k] times B [k, n] of half precision -> fp32 [m, n]; a CPU widens the operands."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else upcast(a).matmul(upcast(b))
