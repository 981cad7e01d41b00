"""The form of `operand` with kernels: one reading for the amaxes where they are needed, one for the codes.

Legend: R rows (tokens), C columns (features), m matrices, n experts, N outputs of a weight.
"""

from typing import NamedTuple, TypeVar

import torch

from megatron.core.fp8.quantize import Operand, Quantized, factor_of
from megatron.core.fp8.recipes import Fp8RecipeSpec, Scaling
from megatron.core.fusions.fp8_quantize import BLOCK, Factors, Mode, Owners, amaxes, cast

ACTIVATION_MODES = {Scaling.TENSOR: Mode.MATRIX, Scaling.ROW: Mode.LINES, Scaling.BLOCK: Mode.STRIPS}
WEIGHT_MODES = {Scaling.TENSOR: Mode.MATRIX, Scaling.ROW: Mode.LINES, Scaling.BLOCK: Mode.SQUARES}
BLOCKS = {Mode.MATRIX: None, Mode.LINES: None, Mode.STRIPS: (1, BLOCK), Mode.SQUARES: (BLOCK, BLOCK)}

T = TypeVar("T")


class _Scales(NamedTuple):
    """What is known before the cast."""

    factors: Factors
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None


def kernel_activation(
    values: torch.Tensor,
    recipe: Fp8RecipeSpec,
    dtype: torch.dtype,
    ends: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    by_row: bool = True,
    by_column: bool = True,
) -> Operand:
    """`quantize_activation`: values [R, C], ends int [n] or None, factor fp32 [] or None."""
    mode, owners = ACTIVATION_MODES[recipe.scaling], _owners(values, ends)
    wide = _quantize(values.unsqueeze(0), mode, dtype, factor, owners, by_row=by_row, by_column=by_column)
    return _of_one_matrix(wide, mode)


def kernel_weight(
    weight: torch.Tensor, recipe: Fp8RecipeSpec, dtype: torch.dtype, factor: torch.Tensor | None = None
) -> Operand:
    """`quantize_weight`: [N, C] or [n, N, C], factor fp32 [] or None."""
    mode = WEIGHT_MODES[recipe.scaling]
    if weight.dim() == 3:
        return _quantize(weight, mode, dtype, factor)
    return _of_one_matrix(_quantize(weight.unsqueeze(0), mode, dtype, factor), mode)


def kernel_amax(values: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """`tensor_amax`: values [R, C] or [n, N, C], ends int [n] or None -> fp32 []."""
    matrices = values if values.dim() == 3 else values.unsqueeze(0)
    found = _known(amaxes(matrices, by_line=False, owners=_owners(values, ends)).matrix)
    # as integers, whose order is that of magnitudes, a NaN is not lost
    return found.view(torch.int32).amax().view(torch.float32)


def _owners(values: torch.Tensor, ends: torch.Tensor | None) -> Owners | None:
    """Experts of the rows of values [R, C]; ends int [n]."""
    if ends is None:
        return None
    rows = torch.arange(values.shape[0], device=values.device, dtype=ends.dtype)
    return Owners(torch.searchsorted(ends, rows, right=True, out_int32=True), ends.numel())


def _quantize(
    values: torch.Tensor,
    mode: Mode,
    dtype: torch.dtype,
    factor: torch.Tensor | None = None,
    owners: Owners | None = None,
    *,
    by_row: bool = True,
    by_column: bool = True,
) -> Operand:
    """Quantise values [m, R, C]; factor fp32 [] or None."""
    scales = _Scales(Factors())
    if mode is Mode.MATRIX:
        scales = _matrix_scales(values, dtype, factor, owners)
    elif mode is Mode.LINES:
        scales = _line_scales(values, dtype, owners, by_column)
    codes = cast(values, dtype, mode, scales.factors, owners, by_row=by_row, by_column=by_column)
    rows = columns = None
    if codes.rows is not None:
        rows = Quantized(codes.rows, _known(codes.row_scale, scales.rows), BLOCKS[mode])
    if codes.columns is not None:
        columns = Quantized(codes.columns, _known(codes.column_scale, scales.columns), BLOCKS[mode])
    return Operand(rows, columns)


def _matrix_scales(
    values: torch.Tensor, dtype: torch.dtype, factor: torch.Tensor | None, owners: Owners | None
) -> _Scales:
    """One scale for each of values [m, R, C], as [m, 1, 1]; factor fp32 [] serves all."""
    if factor is None:
        factor = factor_of(_known(amaxes(values, by_line=False, owners=owners).matrix), dtype)
    scale = factor.reciprocal().expand(len(values)).view(-1, 1, 1)
    return _Scales(Factors(matrix=factor.expand(len(values)).contiguous()), scale, scale)


def _line_scales(values: torch.Tensor, dtype: torch.dtype, owners: Owners | None, by_column: bool) -> _Scales:
    """Scales of values [m, R, C] by row [m, R, 1] and by column [m, C, 1], or [1, n, C] within experts."""
    found = amaxes(values, by_line=True, by_column=by_column, owners=owners)
    rows = factor_of(_known(found.rows), dtype)
    if found.columns is None:
        return _Scales(Factors(rows=rows), rows.reciprocal().unsqueeze(-1))
    columns = factor_of(found.columns, dtype)
    scale = columns.reciprocal()
    if owners is None:
        return _Scales(Factors(rows=rows, columns=columns), rows.reciprocal().unsqueeze(-1), scale.unsqueeze(-1))
    table = torch.cat([columns, torch.ones_like(columns[:1])])  # the rows behind the last expert
    return _Scales(Factors(rows=rows, columns=table), rows.reciprocal().unsqueeze(-1), scale.unsqueeze(0))


def _of_one_matrix(wide: Operand, mode: Mode) -> Operand:
    """Drop the first dimension of codes [1, R, C] and of their scales; that of a matrix becomes []."""

    def only(part: Quantized | None) -> Quantized | None:
        if part is None:
            return None
        scale = part.scale.squeeze(0)
        return Quantized(part.codes.squeeze(0), scale.view(()) if mode is Mode.MATRIX else scale, part.block)

    return Operand(only(wide.rows), only(wide.columns))


def _known(*options: T | None) -> T:
    """Return the one that is there."""
    (found,) = [option for option in options if option is not None]
    return found
