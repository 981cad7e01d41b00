"""The two products of FP8 experts with SwiGLU between them, as one step of autograd.

    forward    codes of X -> fc1 -> x -> SwiGLU as codes -> fc2
    backward   codes of dY -> fc2 dgrad -> dy -> gradient of SwiGLU as codes -> fc1 dgrad

What is quantised right after SwiGLU, and after its gradient, is never written as 16-bit numbers. Results are those of
`fp8_grouped_linear`, the weighted activation and `fp8_grouped_linear`, bit for bit but for the order in which a kernel
sums the gradient of the probabilities.

Legend: R rows sorted by expert, h width, f inner width, n experts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.deferred_wgrad import WgradSink
from megatron.core.fp8.gemm import grouped_matmul
from megatron.core.fp8.layer_state import GRADIENT, INPUT, Fp8LayerState
from megatron.core.fp8.linear import Fp8GroupedWgrad
from megatron.core.fp8.operand import quantize_activation
from megatron.core.fp8.quantize import Quantized
from megatron.core.fp8.recipes import FORWARD_DTYPE
from megatron.core.fp8.swiglu import quantize_swiglu, quantize_swiglu_gradient


@dataclasses.dataclass(frozen=True)
class Fp8GroupedWeights:
    """One of the two products."""

    weights: Sequence[torch.Tensor]
    """n x [out, in]"""

    state: Fp8LayerState
    """Of this product; its weight gradient is one of codes."""

    fuses_wgrad: bool = True
    """Weight gradients are added to the main gradients inside the product."""


def fp8_swiglu_experts(
    rows: torch.Tensor,
    probs: torch.Tensor | None,
    ends: torch.Tensor,
    fc1: Fp8GroupedWeights,
    fc2: Fp8GroupedWeights,
) -> torch.Tensor:
    """Run each expert's rows through it: rows [R, h], probs [R] or None for ones, ends int32 [n] -> [R, h].

    Memory: keeps codes of the rows, of SwiGLU's result and of the weights, the result of fc1 and the probabilities.
    Host:   no synchronisation on a GPU.
    """
    sinks = [WgradSink(part.weights, part.fuses_wgrad) for part in (fc1, fc2)]
    states = fc1.state, fc2.state
    return _Fp8SwigluExperts.apply(
        sinks, states, torch.is_grad_enabled(), rows, probs, ends, *fc1.weights, *fc2.weights
    )


class _Fp8SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        sinks: Sequence[WgradSink],
        states: tuple[Fp8LayerState, Fp8LayerState],
        has_backward: bool,
        rows: torch.Tensor,
        probs: torch.Tensor | None,
        ends: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        recipe, num_experts, dtype = states[0].setup.recipe, len(weights) // 2, rows.dtype
        needs_wgrad = has_backward and any(ctx.needs_input_grad[6:])
        first, second = (state.history(INPUT, has_backward) for state in states)
        inputs = quantize_activation(rows, recipe, FORWARD_DTYPE, ends, first, by_column=needs_wgrad)
        fc1 = states[0].weight(weights[:num_experts], is_grouped=True)
        x = grouped_matmul(inputs.by_row, fc1.by_row, ends, dtype, is_fast=True)
        inner = quantize_swiglu(x, probs, recipe, FORWARD_DTYPE, ends, second, by_column=needs_wgrad)
        fc2 = states[1].weight(weights[num_experts:], is_grouped=True)
        kept = [fc1.by_column, fc2.by_column]
        kept += [inputs.by_column, inner.by_column] if needs_wgrad else []
        ctx.sinks, ctx.states, ctx.num_experts = sinks, states, num_experts
        ctx.save_for_backward(ends, x, probs, *(part for one in kept for part in (one.codes, one.scale)))
        return grouped_matmul(inner.by_row, fc2.by_row, ends, dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ends, x, probs, *kept = ctx.saved_tensors
        setup, needed = ctx.states[0].setup, ctx.needs_input_grad[6:]
        recipe, dtype, needs_wgrad = setup.recipe, setup.gradient_dtype, any(needed)
        first, second = (state.history(GRADIENT) for state in ctx.states)
        blocks = [recipe.weight_block] * 2 + [recipe.activation_block] * 2
        parts = zip(kept[::2], kept[1::2], blocks, strict=False)
        fc1, fc2, *inputs = (Quantized(codes, scale, block) for codes, scale, block in parts)
        outputs = quantize_activation(grads[0], recipe, dtype, ends, second, by_column=needs_wgrad)
        grad_inner = grouped_matmul(outputs.by_row, fc2, ends, x.dtype)
        weight_grads: list[torch.Tensor | None] = [None] * len(needed)
        if needs_wgrad:
            weight_grads[ctx.num_experts :] = ctx.sinks[1].take(
                Fp8GroupedWgrad(outputs.by_column, inputs[1], ends, x.dtype)
            )
        middle, grad_probs = quantize_swiglu_gradient(
            grad_inner, x, probs, recipe, dtype, ends, first, by_column=needs_wgrad
        )
        del outputs, grad_inner
        grad_rows = grouped_matmul(middle.by_row, fc1, ends, x.dtype) if ctx.needs_input_grad[3] else None
        if needs_wgrad:
            weight_grads[: ctx.num_experts] = ctx.sinks[0].take(
                Fp8GroupedWgrad(middle.by_column, inputs[0], ends, x.dtype)
            )
        return None, None, None, grad_rows, grad_probs, None, *weight_grads
