"""Quantisation on a GPU: codes in both orientations from one reading.

    cast    values [n, R, C] -> codes [n, R, C] and, of the transpose, [n, C, R]

Where a scale serves more than a block, `fp8_amax` reads the values first, unless a history knows the scale (delayed
scaling). Blocks need no other pass: a program holds whole blocks and makes their scales itself.

A thread holds some columns of a few neighbouring rows. Bytes of the transpose that lie side by side are thus made by
one thread, and cross shared memory several at a time:

    rows      high * LOW + low        high: over threads, low: within a thread
    tile      [HIGH, LOW, COLUMNS] -> [COLUMNS, HIGH, LOW] = [COLUMNS, ROWS]

Tiles are walked in bands of `band` tiles along the rows, so that programs side by side write neighbouring parts of the
transpose.

The bits are those of the plain form (`core/fp8/quantize`).

Legend: n matrices (1 for activations), R rows, C columns, E experts whose rows end at `ends`; the undefined rows behind
the last one's count as zeros. Rows of one expert begin at multiples of 16, and of 128 in block modes.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
import enum
from dataclasses import dataclass

import torch

from megatron.core import streams
from megatron.core.fusions.fp8_amax import factor_of_bits, last_row
from megatron.core.fusions.fp8_blocks import block_factor, codes_of, magnitude
from megatron.core.fusions.triton_casts import is_interpreted
from megatron.core.optional_deps import is_available, tl, triton_jit

BLOCK = 128
"""Elements that share a scale in block mode."""


class Mode(enum.IntEnum):
    """Which scales the cast uses; a number, because kernels compare it."""

    MATRIX = 0
    """One for each matrix."""

    LINES = 1
    """One for each row; one for each column within an expert; given."""

    STRIPS = 2
    """One for 128 elements in the direction of the sum, made here: 1 x 128 by row, 128 x 1 by column."""

    SQUARES = 3
    """One for 128 x 128 elements, made here."""


@dataclass(frozen=True)
class CastCut:
    """How the kernel is cut; changes speed, not results."""

    high: int = 32
    low: int = 4
    columns: int = 128
    num_warps: int = 8
    band: int = 8
    max_registers: int | None = 128
    """of a thread, so that two programs of 8 warps share an SM"""


BLOCK_CUT, ROW_CUT = CastCut(), CastCut(high=16, num_warps=4)
CUTS = {
    (Mode.MATRIX, True): ROW_CUT,
    (Mode.MATRIX, False): ROW_CUT,
    (Mode.LINES, True): CastCut(),
    (Mode.LINES, False): ROW_CUT,
    (Mode.STRIPS, True): BLOCK_CUT,
    (Mode.STRIPS, False): ROW_CUT,
    (Mode.SQUARES, True): BLOCK_CUT,
    (Mode.SQUARES, False): BLOCK_CUT,
}
"""(mode, with codes of the transpose) -> cut, from `tools/benchmark/fp8.py --what casts`. Blocks fix the tile: strips
128 columns, and 128 rows where the transpose is wanted; squares 128 x 128."""


@dataclass(frozen=True)
class Given:
    """What is known before the cast."""

    amax: torch.Tensor | None = None
    """Of matrices: bits int32 [n], or [1] for all."""

    past: torch.Tensor | None = None
    """Of matrices, fp32 []: an amax that replaces `amax` if it is above 0."""

    noted: torch.Tensor | None = None
    """Of matrices, fp32 []: raised to the largest magnitude that the cast meets."""

    margin: int = 0
    """Of matrices: 2^margin of the range is left unused."""

    rows: torch.Tensor | None = None
    """Factors of lines, fp32 [n, R]."""

    columns: torch.Tensor | None = None
    """Factors of lines, fp32 [n, C], in experts [E, C]."""


@dataclass(frozen=True)
class Codes:
    """Result of a cast."""

    rows: torch.Tensor | None
    """fp8 [n, R, C]"""

    columns: torch.Tensor | None
    """fp8 [n, C, R]"""

    row_scale: torch.Tensor | None
    """fp32; matrices [n], strips [n, R, C / 128], squares [n, R / 128, C / 128] (rounded up)."""

    column_scale: torch.Tensor | None
    """fp32; strips [n, C, R / 128], squares [n, C / 128, R / 128]."""


def has_quantize_kernels(values: torch.Tensor) -> bool:
    """True where the kernels run: values [...] on a GPU, and Triton is installed."""
    return values.is_cuda and is_available("triton")


def cast(
    values: torch.Tensor,
    dtype: torch.dtype,
    mode: Mode,
    given: Given | None = None,
    ends: torch.Tensor | None = None,
    *,
    by_row: bool = True,
    by_column: bool = True,
    cut: CastCut | None = None,
) -> Codes:
    """Quantise values [n, R, C] in the orientations asked for; `ends` int32 [E]. Host: no synchronisation."""
    num_matrices, num_rows, num_columns = values.shape
    given, cut = given or Given(), cut or CUTS[mode, by_column]
    raw = new_codes(values.shape, values.device, mode, by_row, by_column)
    num_experts = 0 if ends is None else ends.numel()
    grid = (-(-num_rows // (cut.high * cut.low)) * -(-num_columns // cut.columns), num_matrices)
    inputs = (values, ends, given.amax, given.past, given.rows, given.columns)
    outputs = (raw.rows, raw.columns, raw.row_scale, raw.column_scale, given.noted)
    streams.declare("fp8 cast", (*inputs, given.noted), outputs)
    _cast_kernel[grid](
        values,
        raw.rows,
        raw.columns,
        raw.row_scale,
        raw.column_scale,
        given.amax,
        given.past,
        None if given.noted is None else given.noted.view(torch.int32),
        given.rows,
        given.columns,
        ends,
        values.stride(0),
        values.stride(1),
        num_rows,
        num_columns,
        num_experts,
        MODE=int(mode),
        BY_ROW=by_row,
        BY_COLUMN=by_column,
        EXPERTS=max(2, 1 << (num_experts - 1).bit_length()) if num_experts else 2,
        IS_SHARED=given.amax is not None and given.amax.numel() == 1,
        SHRINK=2.0**-given.margin,
        IS_E5M2=dtype == torch.float8_e5m2,
        HIGH=cut.high,
        LOW=cut.low,
        COLUMNS=cut.columns,
        BAND=cut.band,
        INTERPRETED=is_interpreted(),
        num_warps=cut.num_warps,
        maxnreg=cut.max_registers,
    )
    return finished_codes(raw, dtype, mode)


def new_codes(shape: torch.Size, device: torch.device, mode: Mode, by_row: bool, by_column: bool) -> Codes:
    """Memory for the codes of values of `shape` [n, R, C] as bytes, and for scales.

    Products want the scales of neighbouring lines side by side: those of strips lie as [n, strips, lines].
    """
    num_matrices, num_rows, num_columns = shape
    tall, wide = -(-num_rows // BLOCK), -(-num_columns // BLOCK)

    def new(is_wanted: bool, dtype: torch.dtype, *size: int) -> torch.Tensor | None:
        return torch.empty(num_matrices, *size, dtype=dtype, device=device) if is_wanted else None

    rows = new(by_row, torch.uint8, num_rows, num_columns)
    columns = new(by_column, torch.uint8, num_columns, num_rows)
    if mode in (Mode.MATRIX, Mode.SQUARES):
        return Codes(rows, columns, new(True, torch.float32, *((tall, wide) if mode is Mode.SQUARES else ())), None)
    is_strips = mode is Mode.STRIPS
    row_scale = new(by_row and is_strips, torch.float32, wide, num_rows)
    return Codes(rows, columns, row_scale, new(by_column and is_strips, torch.float32, tall, num_columns))


def finished_codes(raw: Codes, dtype: torch.dtype, mode: Mode) -> Codes:
    """What a kernel wrote as `Codes` holds it: scales of squares lie as [n, a, b], of strips as [n, strips, lines]."""
    rows, columns = (None if part is None else part.view(dtype) for part in (raw.rows, raw.columns))
    if mode is Mode.SQUARES:
        assert raw.row_scale is not None, "squares have scales"
        return Codes(rows, columns, raw.row_scale, raw.row_scale.transpose(1, 2))
    if mode is Mode.MATRIX:
        return Codes(rows, columns, raw.row_scale, raw.row_scale)
    scales = (None if part is None else part.transpose(1, 2) for part in (raw.row_scale, raw.column_scale))
    return Codes(rows, columns, *scales)


@triton_jit
def _matrix_factor(amax, past, IS_SHARED: tl.constexpr, SHRINK: tl.constexpr, IS_E5M2: tl.constexpr):
    """Factor fp32 [] of the matrix of this program."""
    MAX_CODE: tl.constexpr = 57344.0 if IS_E5M2 else 448.0
    bits = tl.load(amax + (0 if IS_SHARED else tl.program_id(1)))
    if past is not None:
        known = tl.load(past)
        bits = tl.where(known > 0.0, known.to(tl.int32, bitcast=True), bits)
    return factor_of_bits(bits, MAX_CODE) * SHRINK


@triton_jit
def _owners(ends, first_row, num_experts, EXPERTS: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Expert int32 [HIGH, 1, 1] of each LOW rows of a tile; E behind the last."""
    experts = tl.arange(0, EXPERTS)
    known = tl.load(ends + experts, mask=experts < num_experts, other=0x7FFFFFFF)
    expert = tl.sum((known <= first_row).to(tl.int32), axis=0)
    rows = first_row + tl.arange(0, HIGH)[:, None, None] * LOW
    owners = tl.full((HIGH, 1, 1), 0, tl.int32) + expert
    end = tl.load(ends + expert, mask=expert < num_experts, other=0x7FFFFFFF)
    while end < first_row + HIGH * LOW:
        owners += (rows >= end).to(tl.int32)
        expert += 1
        end = tl.load(ends + expert, mask=expert < num_experts, other=0x7FFFFFFF)
    return owners


@triton_jit
def _cast_kernel(
    values,
    row_codes,
    column_codes,
    row_scale,
    column_scale,
    amax,
    past,
    noted,
    row_factor,
    column_factor,
    ends,
    matrix_stride,
    row_stride,
    num_rows,
    num_columns,
    num_experts,
    MODE: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    EXPERTS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    SHRINK: tl.constexpr,
    IS_E5M2: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of one matrix of values [n, R, C]."""
    matrix = tl.program_id(1).to(tl.int64)
    row_tile, column_tile = tile_place(tl.program_id(0), num_rows, num_columns, HIGH * LOW, COLUMNS, BAND)
    first_row, first_column = row_tile * (HIGH * LOW), column_tile * COLUMNS
    row = tl.arange(0, HIGH)[:, None, None] * LOW + tl.arange(0, LOW)[None, :, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    is_read = (first_row + row < last_row(ends, num_rows, num_experts)) & (first_column + column < num_columns)
    start = values + matrix * matrix_stride + first_row.to(tl.int64) * row_stride + first_column
    x = tl.load(start + (row * row_stride + column), mask=is_read, other=0.0).to(tl.float32)
    cast_tile(
        x,
        matrix,
        first_row,
        first_column,
        num_columns,
        row_codes,
        column_codes,
        row_scale,
        column_scale,
        amax,
        past,
        noted,
        row_factor,
        column_factor,
        ends,
        num_rows,
        num_columns,
        num_experts,
        MODE,
        BY_ROW,
        BY_COLUMN,
        EXPERTS,
        IS_SHARED,
        SHRINK,
        IS_E5M2,
        HIGH,
        LOW,
        COLUMNS,
        INTERPRETED,
    )


@triton_jit
def tile_place(tile, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """Number of a tile of a matrix [R, C] -> (down, across): bands of BAND tiles, each walked down column by column."""
    down, across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    top = tile // (BAND * across) * BAND
    height = tl.minimum(down - top, BAND)
    return top + tile % (BAND * across) % height, tile % (BAND * across) // height


@triton_jit
def largest_of(bits):
    """Largest int32 [] of bits [HIGH, LOW, COLUMNS]."""
    return tl.max(tl.max(tl.max(bits, axis=2), axis=1), axis=0)


@triton_jit
def note_amax(largest, noted):
    """Raise the bits int32 [] at `noted`."""
    if largest > tl.load(noted):  # spares most of the writes: the amax of a step only grows
        tl.atomic_max(noted, largest)


@triton_jit
def cast_tile(
    x,
    matrix,
    first_row,
    first_column,
    end_column,
    row_codes,
    column_codes,
    row_scale,
    column_scale,
    amax,
    past,
    noted,
    row_factor,
    column_factor,
    ends,
    num_rows,
    num_columns,
    num_experts,
    MODE: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    EXPERTS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    SHRINK: tl.constexpr,
    IS_E5M2: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Codes and scales of one tile x fp32 [HIGH, LOW, COLUMNS] of one matrix [R, C], up to `end_column`.

    Rows that do not count, and columns behind the end, are zeros in x.
    """
    ROWS: tl.constexpr = HIGH * LOW
    down, across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    row = tl.arange(0, HIGH)[:, None, None] * LOW + tl.arange(0, LOW)[None, :, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    is_row, is_column = first_row + row < num_rows, first_column + column < end_column
    by_row = 1.0
    by_column = 1.0
    if MODE == 0:
        by_row = _matrix_factor(amax, past, IS_SHARED, SHRINK, IS_E5M2)
        by_column = by_row
        if tl.program_id(0) == 0:
            tl.store(row_scale + matrix, tl.div_rn(1.0, by_row))
        if noted is not None:
            note_amax(largest_of(magnitude(x)), noted)
    elif MODE == 3:
        by_row, scale = block_factor(largest_of(magnitude(x)), IS_E5M2)
        by_column = by_row
        tl.store(row_scale + (matrix * down + first_row // ROWS) * across + first_column // COLUMNS, scale)
    CHECKS: tl.constexpr = past is not None
    if BY_ROW:
        if MODE == 1:
            spot = row_factor + matrix * num_rows + first_row + row
            by_row = tl.load(spot, mask=is_row, other=1.0)
        elif MODE == 2:
            by_row, scale = block_factor(tl.max(magnitude(x), axis=2, keep_dims=True), IS_E5M2)
            spot = row_scale + (matrix * across + first_column // COLUMNS) * num_rows + first_row
            tl.store(spot + row, scale, mask=is_row)
        code = codes_of(x * by_row, CHECKS, IS_E5M2, INTERPRETED)
        start = row_codes + (matrix * num_rows + first_row) * num_columns + first_column
        tl.store(start + (row * num_columns + column), code, mask=is_row & is_column)
    if BY_COLUMN:
        if MODE == 1:
            spot = column_factor + first_column + column
            if ends is None:
                by_column = tl.load(spot + matrix * num_columns, mask=is_column, other=1.0)
            else:
                owners = _owners(ends, first_row, num_experts, EXPERTS, HIGH, LOW)
                by_column = tl.load(spot + owners * num_columns, mask=is_column & (owners < num_experts), other=1.0)
        elif MODE == 2:
            largest = tl.max(tl.max(magnitude(x), axis=1, keep_dims=True), axis=0, keep_dims=True)
            by_column, scale = block_factor(largest, IS_E5M2)
            spot = column_scale + (matrix * down + first_row // ROWS) * num_columns + first_column
            tl.store(spot + column, scale, mask=is_column)
        code = codes_of(x * by_column, CHECKS, IS_E5M2, INTERPRETED)
        code = tl.reshape(tl.permute(code, (2, 0, 1)), (COLUMNS, ROWS))
        start = column_codes + (matrix * num_columns + first_column) * num_rows + first_row
        line, place = tl.arange(0, COLUMNS)[:, None], tl.arange(0, ROWS)[None, :]
        mask = (first_column + line < end_column) & (first_row + place < num_rows)
        tl.store(start + (line * num_rows + place), code, mask=mask)
