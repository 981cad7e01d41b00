"""The form of `operand` with kernels: one reading for the amaxes where they are needed, one for the codes.

    blocks, and delayed scaling with a history     one reading
    tensors, rows                                  two

Legend: R rows (tokens), C columns (features), m matrices, n experts, N outputs of a weight.
"""

import torch

from megatron.core.fp8.quantize import AmaxHistory, Operand, Quantized, max_code
from megatron.core.fp8.recipes import Fp8RecipeSpec, Scaling
from megatron.core.fusions.fp8_amax import line_amaxes, line_factors, matrix_amax
from megatron.core.fusions.fp8_quantize import BLOCK, Codes, Given, Mode, cast

ACTIVATION_MODES = {Scaling.TENSOR: Mode.MATRIX, Scaling.ROW: Mode.LINES, Scaling.BLOCK: Mode.STRIPS}
WEIGHT_MODES = {Scaling.TENSOR: Mode.MATRIX, Scaling.ROW: Mode.LINES, Scaling.BLOCK: Mode.SQUARES}
_TURNED_LATER = 4
"""Bytes of an element whose codes by column are not made by the kernel: compiled for fp32 it puts them in wrong places
(Triton 3.6; right in the interpreter)."""
BLOCKS = {Mode.MATRIX: None, Mode.LINES: None, Mode.STRIPS: (1, BLOCK), Mode.SQUARES: (BLOCK, BLOCK)}


def kernel_activation(
    values: torch.Tensor,
    recipe: Fp8RecipeSpec,
    dtype: torch.dtype,
    ends: torch.Tensor | None = None,
    history: AmaxHistory | None = None,
    by_row: bool = True,
    by_column: bool = True,
) -> Operand:
    """`quantize_activation`: values [R, C] with at least one element, ends int32 [n] or None."""
    mode = ACTIVATION_MODES[recipe.scaling]
    return _quantize(_with_unit_stride(values).unsqueeze(0), mode, dtype, history, ends, by_row, by_column)


def kernel_weight(
    weight: torch.Tensor, recipe: Fp8RecipeSpec, dtype: torch.dtype, history: AmaxHistory | None = None
) -> Operand:
    """`quantize_weight`: [N, C] or [n, N, C]."""
    mode = WEIGHT_MODES[recipe.scaling]
    if weight.dim() == 3:
        return _quantize(_with_unit_stride(weight), mode, dtype, history, is_one=False)
    return _quantize(_with_unit_stride(weight).unsqueeze(0), mode, dtype, history)


def _with_unit_stride(values: torch.Tensor) -> torch.Tensor:
    """Values [..., C] whose rows are contiguous; a copy if they are not."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _quantize(
    values: torch.Tensor,
    mode: Mode,
    dtype: torch.dtype,
    history: AmaxHistory | None = None,
    ends: torch.Tensor | None = None,
    by_row: bool = True,
    by_column: bool = True,
    *,
    is_one: bool = True,
) -> Operand:
    """Quantise values [m, R, C]; with `is_one` m is 1, and the operand is of [R, C]."""
    given, scales = Given(), (None, None)
    if mode is Mode.MATRIX:
        given = _given_matrices(values, history, ends)
    elif mode is Mode.LINES:
        given, scales = _given_lines(values, dtype, ends, by_row, by_column)
    turns = mode is Mode.MATRIX and by_column and values.element_size() == _TURNED_LATER
    codes = cast(values, dtype, mode, given, ends, by_row=by_row or turns, by_column=by_column and not turns)
    if turns:
        codes = _turned(codes, by_row)
    return line_up(codes, mode, scales, is_one=is_one)


def _turned(codes: Codes, by_row: bool) -> Codes:
    """Add the transpose of codes fp8 [m, R, C], whose scales serve both orientations; drop themselves if not wanted."""
    assert codes.rows is not None, "codes to be turned"
    columns = codes.rows.view(torch.uint8).transpose(1, 2).contiguous().view(codes.rows.dtype)
    return Codes(codes.rows if by_row else None, columns, codes.row_scale, codes.row_scale)


def _given_matrices(values: torch.Tensor, history: AmaxHistory | None, ends: torch.Tensor | None) -> Given:
    """What is known of values [m, R, C] that share a scale; a history serves all of them."""
    if history is None:
        return Given(matrix_amax(values, ends))
    present = matrix_amax(values, ends, history.past, is_shared=True)
    return Given(present, history.past, history.noted, history.margin)


def _given_lines(
    values: torch.Tensor, dtype: torch.dtype, ends: torch.Tensor | None, by_row: bool, by_column: bool
) -> tuple[Given, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Factors of the lines of values [m, R, C], and their scales [m, R, 1] and [m, C, 1], or [1, n, C] in experts."""
    of_rows, of_columns = line_amaxes(values, ends, by_row, by_column)
    rows = columns = row_scale = column_scale = None
    if of_rows is not None:
        rows, row_scale = line_factors(of_rows, max_code(dtype))
        row_scale = row_scale.unsqueeze(-1)
    if of_columns is not None:
        columns, column_scale = line_factors(of_columns, max_code(dtype))
        column_scale = column_scale.unsqueeze(-1 if ends is None else 0)
    return Given(rows=rows, columns=columns), (row_scale, column_scale)


def line_up(
    codes: Codes,
    mode: Mode,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    *,
    is_one: bool = True,
) -> Operand:
    """What a kernel made of [m, R, C] as an operand, of [R, C] with `is_one`; `scales` of lines are given [m, R, 1]."""
    made = codes.row_scale, codes.column_scale
    row_scale, column_scale = (lines if one is None else one for one, lines in zip(made, scales, strict=True))
    return Operand(
        _quantized(codes.rows, row_scale, mode, is_one), _quantized(codes.columns, column_scale, mode, is_one)
    )


def _quantized(codes: torch.Tensor | None, scale: torch.Tensor | None, mode: Mode, is_one: bool) -> Quantized | None:
    """Codes [m, R, C] with their scales as `Quantized` holds them."""
    if codes is None:
        return None
    assert scale is not None, "codes without scales"
    if mode is Mode.MATRIX:
        scale = scale.view(()) if is_one else scale.view(-1, 1, 1)
    elif is_one:
        scale = scale.squeeze(0)
    return Quantized(codes.squeeze(0) if is_one else codes, scale, BLOCKS[mode])
