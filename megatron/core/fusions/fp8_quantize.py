"""Quantisation on a GPU: the largest magnitudes in one pass, the codes in both orientations in another.

    amax    values [n, R, C] -> largest |x| of the whole, or of each row and of each column within its expert
    cast    values [n, R, C] -> codes [n, R, C] and, of the transpose, [n, C, R], each element read once

Factors are made between the passes, from few numbers, by whoever calls. Blocks need no first pass: a program holds
whole blocks, makes their factors itself and returns their scales.

Rows may belong to experts (`Owners`); the undefined rows behind the last one's count as zeros. Rows of one expert begin
at multiples of 16, and of 128 in block modes.

The bits are those of the plain form (`core/fp8/quantize`). Magnitudes are compared as integers: for floats without sign
the order is the same, an infinity stands above all finite numbers and NaN above it, so that neither is lost, and the
order in which programs arrive does not matter.

Legend: n matrices (1 for activations), R rows, C columns, E experts.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
import enum
from dataclasses import dataclass

import torch

from megatron.core import streams
from megatron.core.fusions.fp8_blocks import block_factor, codes_of, inverse, magnitude
from megatron.core.fusions.triton_casts import is_interpreted
from megatron.core.optional_deps import is_available, tl, triton_jit

BLOCK = 128
"""Elements that share a scale in block mode."""

_ROWS_OF_OWNER = 16  # rows of one expert are a multiple of this


class Mode(enum.IntEnum):
    """Which scales the cast uses; a number, because kernels compare it."""

    MATRIX = 0
    """One for each matrix, given."""

    LINES = 1
    """One for each row; one for each column within an expert; given."""

    STRIPS = 2
    """One for 128 elements in the direction of the sum, made here: 1 x 128 by row, 128 x 1 by column."""

    SQUARES = 3
    """One for 128 x 128 elements, made here."""


@dataclass(frozen=True)
class Owners:
    """Which expert each row belongs to."""

    of_row: torch.Tensor
    """int32 [R]; E behind the last expert."""

    num_experts: int
    """E"""


@dataclass(frozen=True)
class Amaxes:
    """Largest magnitudes, fp32."""

    matrix: torch.Tensor | None
    """[n]"""

    rows: torch.Tensor | None
    """[n, R]"""

    columns: torch.Tensor | None
    """[n or E, C]"""


@dataclass(frozen=True)
class Factors:
    """What a cast multiplies by, fp32."""

    matrix: torch.Tensor | None = None
    """[n]"""

    rows: torch.Tensor | None = None
    """[n, R]"""

    columns: torch.Tensor | None = None
    """[n, C], with owners [E + 1, C]."""


@dataclass(frozen=True)
class Codes:
    """Result of a cast."""

    rows: torch.Tensor | None
    """fp8 [n, R, C]"""

    columns: torch.Tensor | None
    """fp8 [n, C, R]"""

    row_scale: torch.Tensor | None
    """Block modes, fp32: [n, R, C / 128] for strips, [n, R / 128, C / 128] for squares (rounded up)."""

    column_scale: torch.Tensor | None
    """Block modes, fp32: [n, C, R / 128] for strips, [n, C / 128, R / 128] for squares."""


def has_quantize_kernels(values: torch.Tensor) -> bool:
    """True where the kernels run: values [...] on a GPU, and Triton is installed."""
    return values.is_cuda and is_available("triton")


def amaxes(values: torch.Tensor, *, by_line: bool, by_column: bool = True, owners: Owners | None = None) -> Amaxes:
    """Largest magnitudes of values [n, R, C], of each matrix or of its lines. Host: no synchronisation."""
    num_matrices, num_rows, num_columns = values.shape
    values = _with_unit_stride(values)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=values.device)

    matrix = None if by_line else zeros(num_matrices)
    rows = zeros(num_matrices, num_rows) if by_line else None
    num_experts = 0 if owners is None else owners.num_experts
    columns = None
    if by_line and by_column:
        columns = zeros(num_matrices if owners is None else num_experts, num_columns)
    tile_rows = _ROWS_OF_OWNER if by_line and owners is not None else 64
    if values.numel():
        of_row = None if owners is None else owners.of_row
        found = (matrix, rows, columns)
        streams.declare("fp8 amaxes", (values, of_row, *found), found)
        _amax_kernel[(-(-num_rows // tile_rows), num_matrices)](
            values,
            matrix,
            rows,
            columns,
            of_row,
            values.stride(0),
            values.stride(1),
            num_rows,
            num_columns,
            num_experts,
            BY_LINE=by_line,
            BY_COLUMN=columns is not None,
            HAS_OWNERS=owners is not None,
            ROWS=tile_rows,
            COLUMNS=8192 // tile_rows,
            num_warps=8,
        )
    return Amaxes(*(None if part is None else part.view(torch.float32) for part in (matrix, rows, columns)))


def cast(
    values: torch.Tensor,
    dtype: torch.dtype,
    mode: Mode,
    factors: Factors | None = None,
    owners: Owners | None = None,
    by_row: bool = True,
    by_column: bool = True,
) -> Codes:
    """Quantise values [n, R, C] in the orientations asked for. Host: no synchronisation."""
    num_matrices, num_rows, num_columns = values.shape
    values, factors = _with_unit_stride(values), factors or Factors()
    raw = _new_codes(values, mode, by_row, by_column)
    has_blocks = mode in (Mode.STRIPS, Mode.SQUARES)
    tile = (BLOCK, BLOCK) if has_blocks else (64, 128)
    if values.numel():
        grid = (-(-num_rows // tile[0]) * -(-num_columns // tile[1]), num_matrices)
        row_factor = factors.matrix if mode is Mode.MATRIX else factors.rows
        of_row = None if owners is None else owners.of_row
        made = (raw.rows, raw.columns, raw.row_scale, raw.column_scale)
        streams.declare("fp8 cast", (values, row_factor, factors.columns, of_row), made)
        _cast_kernel[grid](
            values,
            raw.rows,
            raw.columns,
            row_factor,
            factors.columns,
            raw.row_scale,
            raw.column_scale,
            of_row,
            values.stride(0),
            values.stride(1),
            num_rows,
            num_columns,
            0 if owners is None else owners.num_experts,
            MODE=int(mode),
            BY_ROW=by_row,
            BY_COLUMN=by_column,
            HAS_OWNERS=owners is not None,
            IS_E5M2=dtype == torch.float8_e5m2,
            MAX_CODE=torch.finfo(dtype).max,
            ROWS=tile[0],
            COLUMNS=tile[1],
            INTERPRETED=is_interpreted(),
            num_warps=16 if has_blocks else 8,
        )
    rows, columns = (None if part is None else part.view(dtype) for part in (raw.rows, raw.columns))
    if mode is Mode.SQUARES:
        assert raw.row_scale is not None, "squares have scales"
        return Codes(rows, columns, raw.row_scale, raw.row_scale.transpose(1, 2))
    turned = (None if part is None else part.transpose(1, 2) for part in (raw.row_scale, raw.column_scale))
    return Codes(rows, columns, *turned)


def _new_codes(values: torch.Tensor, mode: Mode, by_row: bool, by_column: bool) -> Codes:
    """Memory for the codes of values [n, R, C] as bytes, and for scales.

    Products want the scales of neighbouring lines side by side: those of strips lie as [n, strips, lines].
    """
    num_matrices, num_rows, num_columns = values.shape
    tall, wide = -(-num_rows // BLOCK), -(-num_columns // BLOCK)

    def new(is_wanted: bool, dtype: torch.dtype, *shape: int) -> torch.Tensor | None:
        return torch.empty(num_matrices, *shape, dtype=dtype, device=values.device) if is_wanted else None

    rows = new(by_row, torch.uint8, num_rows, num_columns)
    columns = new(by_column, torch.uint8, num_columns, num_rows)
    if mode is Mode.SQUARES:
        return Codes(rows, columns, new(True, torch.float32, tall, wide), None)
    is_strips = mode is Mode.STRIPS
    row_scale = new(by_row and is_strips, torch.float32, wide, num_rows)
    return Codes(rows, columns, row_scale, new(by_column and is_strips, torch.float32, tall, num_columns))


def _with_unit_stride(values: torch.Tensor) -> torch.Tensor:
    """Values [n, R, C] whose rows are contiguous; a copy if they are not."""
    return values if values.stride(2) == 1 else values.contiguous()


@triton_jit
def _amax_kernel(
    values,
    matrix_amax,
    row_amax,
    column_amax,
    owners,
    matrix_stride,
    row_stride,
    num_rows,
    num_columns,
    num_experts,
    BY_LINE: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some rows of one matrix of values [n, R, C], all columns."""
    matrix = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    group = matrix
    if HAS_OWNERS:
        is_row = is_row & (tl.load(owners + rows, mask=is_row, other=num_experts) < num_experts)
        group = tl.load(owners + tl.program_id(0) * ROWS)  # with lines, all of these rows have one owner
    first = values + matrix.to(tl.int64) * matrix_stride + rows.to(tl.int64)[:, None] * row_stride
    largest = tl.zeros((ROWS,), dtype=tl.int32)
    for begin in tl.range(0, num_columns, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        is_column = columns < num_columns
        x = tl.load(first + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        bits = magnitude(x.to(tl.float32))
        largest = tl.maximum(largest, tl.max(bits, axis=1))
        if BY_COLUMN:
            if HAS_OWNERS:
                is_column = is_column & (group < num_experts)  # the rows behind the last expert have no entry
            place = column_amax + group.to(tl.int64) * num_columns + columns
            tl.atomic_max(place, tl.max(bits, axis=0), mask=is_column)
    if BY_LINE:
        tl.store(row_amax + matrix.to(tl.int64) * num_rows + rows, largest, mask=rows < num_rows)
    else:
        tl.atomic_max(matrix_amax + matrix, tl.max(largest, axis=0))


@triton_jit
def _cast_kernel(
    values,
    row_codes,
    column_codes,
    row_factor,
    column_factor,
    row_scale,
    column_scale,
    owners,
    matrix_stride,
    row_stride,
    num_rows,
    num_columns,
    num_experts,
    MODE: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    IS_E5M2: tl.constexpr,
    MAX_CODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of one matrix of values [n, R, C]."""
    matrix = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(num_columns, COLUMNS)
    row_tile, column_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    rows, columns = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_columns
    inside = is_row[:, None] & is_column[None, :]
    rows = rows.to(tl.int64)
    is_read = inside
    owner = rows
    if HAS_OWNERS:
        owner = tl.load(owners + rows, mask=is_row, other=num_experts).to(tl.int64)
        is_read = inside & (owner < num_experts)[:, None]
    place = values + matrix * matrix_stride + rows[:, None] * row_stride + columns[None, :]
    x = tl.load(place, mask=is_read, other=0.0).to(tl.float32)
    by_row = 1.0
    by_column = 1.0
    if MODE == 0:
        by_row = tl.load(row_factor + matrix)
        by_column = by_row
    elif MODE == 1:
        if BY_ROW:
            by_row = tl.load(row_factor + matrix * num_rows + rows, mask=is_row, other=1.0)[:, None]
        if BY_COLUMN:
            group = owner[:, None] if HAS_OWNERS else matrix
            spot = column_factor + group * num_columns + columns[None, :]
            by_column = tl.load(spot, mask=inside if HAS_OWNERS else is_column[None, :], other=1.0)
    elif MODE == 2:
        by_row = block_factor(tl.max(magnitude(x), axis=1), MAX_CODE)
        by_column = block_factor(tl.max(magnitude(x), axis=0), MAX_CODE)
        if BY_ROW:
            tl.store(row_scale + (matrix * tiles + column_tile) * num_rows + rows, inverse(by_row), mask=is_row)
        if BY_COLUMN:
            spot = column_scale + (matrix * tl.cdiv(num_rows, ROWS) + row_tile) * num_columns + columns
            tl.store(spot, inverse(by_column), mask=is_column)
        by_row, by_column = by_row[:, None], by_column[None, :]
    else:
        by_row = block_factor(tl.max(tl.max(magnitude(x), axis=1), axis=0), MAX_CODE)
        by_column = by_row
        tl.store(row_scale + (matrix * tl.cdiv(num_rows, ROWS) + row_tile) * tiles + column_tile, inverse(by_row))
    if BY_ROW:
        code = codes_of(x, by_row, IS_E5M2, INTERPRETED)
        tl.store(row_codes + (matrix * num_rows + rows[:, None]) * num_columns + columns[None, :], code, mask=inside)
    if BY_COLUMN:
        code = tl.trans(codes_of(x, by_column, IS_E5M2, INTERPRETED))
        spot = column_codes + (matrix * num_columns + columns[:, None]) * num_rows + rows[None, :]
        tl.store(spot, code, mask=is_column[:, None] & is_row[None, :])
