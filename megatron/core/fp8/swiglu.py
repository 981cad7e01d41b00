"""SwiGLU of experts with its result quantised, and its gradient likewise: what fc2 and the backward of fc1 are given.

The result is rounded to the dtype of the input before it is quantised, as if it had been written: the codes are those
of the activation and `quantize_activation` one after the other. Kernels do both in one where one reading is enough for
the scales, or where the values are cheaper made twice than written: scales of tensors. Scales of rows also want those
of the columns of each expert; there, and on a CPU, the two run one after the other.

Legend: R rows sorted by expert, f inner width, n experts.
"""

import torch

from megatron.core.fp8.kernel_operand import ACTIVATION_MODES, line_up
from megatron.core.fp8.operand import quantize_activation
from megatron.core.fp8.quantize import AmaxHistory, Operand
from megatron.core.fp8.recipes import Fp8RecipeSpec
from megatron.core.fusions.fp8_quantize import Given
from megatron.core.fusions.fp8_swiglu import has_swiglu_codes, swiglu_codes, swiglu_gradient_codes
from megatron.core.fusions.fused_weighted_activation import weighted_swiglu, weighted_swiglu_backward


def quantize_swiglu(
    x: torch.Tensor,
    probs: torch.Tensor | None,
    recipe: Fp8RecipeSpec,
    dtype: torch.dtype,
    ends: torch.Tensor,
    history: AmaxHistory | None = None,
    by_column: bool = True,
) -> Operand:
    """Quantise silu(gate) * up * p: x [R, 2f], probs [R] or None for ones, ends int32 [n] -> of [R, f].

    Host: no synchronisation.
    """
    mode = ACTIVATION_MODES[recipe.scaling]
    if has_swiglu_codes(x, mode):
        weights = None if probs is None else probs.contiguous()
        codes = swiglu_codes(x, weights, dtype, mode, _given(history), ends, by_column=by_column)
        return line_up(codes, mode)
    return quantize_activation(weighted_swiglu(x, probs), recipe, dtype, ends, history, by_column=by_column)


def quantize_swiglu_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    probs: torch.Tensor | None,
    recipe: Fp8RecipeSpec,
    dtype: torch.dtype,
    ends: torch.Tensor,
    history: AmaxHistory | None = None,
    by_column: bool = True,
) -> tuple[Operand, torch.Tensor | None]:
    """Quantise the gradient of x [R, 2f], from grad [R, f]; also return that of probs [R], None where there are none.

    Host: no synchronisation.
    """
    mode = ACTIVATION_MODES[recipe.scaling]
    if has_swiglu_codes(x, mode):
        operands = grad.contiguous(), x, None if probs is None else probs.contiguous()
        codes, grad_probs = swiglu_gradient_codes(operands, dtype, mode, _given(history), ends, by_column=by_column)
        return line_up(codes, mode), grad_probs
    grad_x, grad_probs = weighted_swiglu_backward(grad, x, probs)
    return quantize_activation(grad_x, recipe, dtype, ends, history, by_column=by_column), grad_probs


def _given(history: AmaxHistory | None) -> Given:
    """What a history knows."""
    return Given() if history is None else Given(past=history.past, noted=history.noted, margin=history.margin)
