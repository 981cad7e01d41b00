"""A matrix as the three products of a linear layer take it: quantised along its rows, along its columns, or both.

A product can only take scales that are constant along the dimension it sums over (up to blocks of 128). Where one
scale serves the whole tensor, or a square block, the second copy is the first one transposed: the hardware wants both
operands contiguous along the sum. Elsewhere it is a quantisation of its own.

Rows may belong to experts. Copies by column are then scaled within each expert, because a weight gradient sums over the
rows of one expert. Rows behind the last expert's are undefined and count as zeros.

On a GPU kernels make both copies from one reading of the matrix, with the bits of the plain form.

Legend: R rows (tokens), C columns (features), n experts, N outputs of a weight.
"""

import torch

from megatron.core.fp8.kernel_operand import kernel_activation, kernel_weight
from megatron.core.fp8.plain_operand import factor_from_history, plain_activation, plain_weight
from megatron.core.fp8.quantize import AmaxHistory, Operand
from megatron.core.fp8.recipes import Fp8RecipeSpec
from megatron.core.fusions.fp8_quantize import has_quantize_kernels


def quantize_activation(
    values: torch.Tensor,
    recipe: Fp8RecipeSpec,
    dtype: torch.dtype,
    ends: torch.Tensor | None = None,
    history: AmaxHistory | None = None,
    by_row: bool = True,
    by_column: bool = True,
) -> Operand:
    """Quantise inputs or gradients.

    Shapes: values [R, C], ends int32 [n] (row ends of the experts) or None; a history for recipes that have one.
    Host:   no synchronisation.
    """
    if _uses_kernels(values):
        return kernel_activation(values, recipe, dtype, ends, history, by_row, by_column)
    factor = None if history is None else factor_from_history(values, dtype, history, ends)
    return plain_activation(values, recipe, dtype, ends, factor, by_row, by_column)


def quantize_weight(
    weight: torch.Tensor, recipe: Fp8RecipeSpec, dtype: torch.dtype, history: AmaxHistory | None = None
) -> Operand:
    """Quantise a weight [N, C], or the weights [n, N, C] of n experts, each with scales of its own.

    A history serves all experts.
    """
    if _uses_kernels(weight):
        return kernel_weight(weight, recipe, dtype, history)
    factor = None if history is None else factor_from_history(weight, dtype, history)
    return plain_weight(weight, recipe, dtype, factor)


def _uses_kernels(values: torch.Tensor) -> bool:
    """True if kernels quantise values [...]: there is nothing to launch for none."""
    return values.numel() > 0 and has_quantize_kernels(values)
