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

from megatron.core.fp8.kernel_operand import kernel_activation, kernel_amax, kernel_weight
from megatron.core.fp8.plain_operand import plain_activation, plain_amax, plain_weight
from megatron.core.fp8.quantize import Operand
from megatron.core.fp8.recipes import Fp8RecipeSpec
from megatron.core.fusions.fp8_quantize import has_quantize_kernels


def quantize_activation(
    values: torch.Tensor,
    recipe: Fp8RecipeSpec,
    dtype: torch.dtype,
    ends: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    by_row: bool = True,
    by_column: bool = True,
) -> Operand:
    """Quantise inputs or gradients.

    Shapes: values [R, C], factor fp32 [] for recipes with a history, ends int [n] (row ends of the experts) or None.
    Host:   no synchronisation.
    """
    form = kernel_activation if has_quantize_kernels(values) else plain_activation
    return form(values, recipe, dtype, ends, factor, by_row, by_column)


def quantize_weight(
    weight: torch.Tensor, recipe: Fp8RecipeSpec, dtype: torch.dtype, factor: torch.Tensor | None = None
) -> Operand:
    """Quantise a weight [N, C], or the weights [n, N, C] of n experts, each with scales of its own.

    `factor` fp32 [] comes from the history of a recipe that has one, and then serves all experts.
    """
    form = kernel_weight if has_quantize_kernels(weight) else plain_weight
    return form(weight, recipe, dtype, factor)


def tensor_amax(values: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Largest magnitude fp32 [] of values [R, C] or [n, N, C], without what lies behind the last of ends int [n]."""
    form = kernel_amax if has_quantize_kernels(values) else plain_amax
    return form(values, ends)
