"""A linear layer in FP8: three products of quantised operands, and what is kept between them.

    forward   Y  = X W^T       keeps X by column and W by column, as codes: half the bytes of bf16, X itself may go
    dgrad     dX = dY W
    wgrad     dW = dY^T X      into the main gradient, in backward or from a queue (`deferred_wgrad`)

With `quantizes_wgrad` off the weight gradient is a product of the original X and dY; X is then kept.

What a layer keeps from one microbatch to the next is in its `Fp8LayerState`.

Legend: R rows (tokens), i input features, o output features, n experts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.deferred_wgrad import WgradSink
from megatron.core.fp8.gemm import add_grouped_wgrad, grouped_matmul, matmul
from megatron.core.fp8.layer_state import GRADIENT, INPUT, Fp8LayerState
from megatron.core.fp8.operand import quantize_activation
from megatron.core.fp8.quantize import Quantized
from megatron.core.fp8.recipes import FORWARD_DTYPE
from megatron.core.fusions.fused_wgrad import DenseWgrad, GroupedWgrad
from megatron.core.utils.stacked import stacked_view


@dataclasses.dataclass(frozen=True)
class Fp8Wgrad:
    """The weight gradient of one matrix from codes: grad [o, R], rows [i, R]."""

    grad: Quantized
    rows: Quantized
    dtype: torch.dtype

    def compute(self) -> list[torch.Tensor]:
        """Return [[o, i]] in the dtype of the layer."""
        return [matmul(self.grad, self.rows, self.dtype)]

    def add_to(self, main_grads: Sequence[torch.Tensor]) -> None:
        """Add to the one main gradient [o, i], without rounding to the dtype of the layer."""
        main_grads[0].add_(matmul(self.grad, self.rows, torch.float32))


@dataclasses.dataclass(frozen=True)
class Fp8GroupedWgrad:
    """The weight gradients of n matrices from codes: grad [o, R], rows [i, R], group ends int [n]."""

    grad: Quantized
    rows: Quantized
    ends: torch.Tensor
    dtype: torch.dtype

    def compute(self) -> list[torch.Tensor]:
        """Return n x [o, i] in the dtype of the layer."""
        return list(self._sums().to(self.dtype).unbind(0))

    def add_to(self, main_grads: Sequence[torch.Tensor]) -> None:
        """Add to n main gradients [o, i], at best the slices of one tensor."""
        view = stacked_view(main_grads)
        if view is not None:
            add_grouped_wgrad(view, self.grad, self.rows, self.ends)
            return
        for main_grad, part in zip(main_grads, self._sums(), strict=True):
            main_grad.add_(part)

    def _sums(self) -> torch.Tensor:
        """Fp32 [n, o, i]; zeros for an expert without rows."""
        sums = torch.zeros(len(self.ends), len(self.grad.codes), len(self.rows.codes), device=self.grad.codes.device)
        add_grouped_wgrad(sums, self.grad, self.rows, self.ends)
        return sums


def fp8_linear(
    input_: torch.Tensor, weight: torch.Tensor, state: Fp8LayerState, fuses_wgrad: bool = True
) -> torch.Tensor:
    """Multiply in FP8: input_ [..., i], weight [o, i] -> [..., o] in the dtype of the input.

    Memory: keeps codes of input and weight; the input itself only without `quantizes_wgrad`.
    """
    rows = input_.reshape(-1, input_.shape[-1])
    output = _Fp8Linear.apply(WgradSink([weight], fuses_wgrad), state, torch.is_grad_enabled(), rows, None, weight)
    return output.view(*input_.shape[:-1], weight.shape[0])


def fp8_grouped_linear(
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ends: torch.Tensor,
    state: Fp8LayerState,
    fuses_wgrad: bool = True,
) -> torch.Tensor:
    """Multiply each expert's rows by its weight in FP8: rows [R, i], n weights [o, i], ends int [n] -> [R, o]."""
    return _Fp8Linear.apply(WgradSink(weights, fuses_wgrad), state, torch.is_grad_enabled(), rows, ends, *weights)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        sink: WgradSink,
        state: Fp8LayerState,
        has_backward: bool,
        rows: torch.Tensor,
        ends: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        recipe = state.setup.recipe
        needs_wgrad = has_backward and any(ctx.needs_input_grad[5:])
        saves_codes = needs_wgrad and state.setup.quantizes_wgrad
        history = state.history(INPUT, has_backward)
        inputs = quantize_activation(rows, recipe, FORWARD_DTYPE, ends, history, by_column=saves_codes)
        matrix = state.weight(weights, is_grouped=ends is not None)
        ctx.sink, ctx.state, ctx.dtype = sink, state, rows.dtype
        kept = (inputs.by_column.codes, inputs.by_column.scale) if saves_codes else (None, None)
        original = rows if needs_wgrad and not saves_codes else None
        ctx.save_for_backward(ends, matrix.by_column.codes, matrix.by_column.scale, *kept, original)
        return _product(inputs.by_row, matrix.by_row, ends, rows.dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        ends, weight_codes, weight_scale, row_codes, row_scale, rows = ctx.saved_tensors
        setup, needed = ctx.state.setup, ctx.needs_input_grad[5:]
        history = ctx.state.history(GRADIENT)
        uses_codes = any(needed) and setup.quantizes_wgrad
        outputs = quantize_activation(grad, setup.recipe, setup.gradient_dtype, ends, history, by_column=uses_codes)
        grad_rows = None
        if ctx.needs_input_grad[3]:
            matrix = Quantized(weight_codes, weight_scale, setup.recipe.weight_block)
            grad_rows = _product(outputs.by_row, matrix, ends, ctx.dtype)
        if not any(needed):
            return None, None, None, grad_rows, None, *[None] * len(needed)
        if not uses_codes:
            product = DenseWgrad(grad, rows) if ends is None else GroupedWgrad(grad, rows, ends)
            return None, None, None, grad_rows, None, *ctx.sink.take(product)
        kept = Quantized(row_codes, row_scale, setup.recipe.activation_block)
        if ends is None:
            product = Fp8Wgrad(outputs.by_column, kept, ctx.dtype)
        else:
            product = Fp8GroupedWgrad(outputs.by_column, kept, ends, ctx.dtype)
        return None, None, None, grad_rows, None, *ctx.sink.take(product)


def _product(
    rows: Quantized, matrix: Quantized, ends: torch.Tensor | None, dtype: torch.dtype, is_fast: bool = False
) -> torch.Tensor:
    """Rows [R, K] times matrix [N, K] transposed, or times [n, N, K] by the groups that end at int [n] -> [R, N]."""
    if ends is None:
        return matmul(rows, matrix, dtype, is_fast)
    return grouped_matmul(rows, matrix, ends, dtype, is_fast)
