"""Largest magnitudes on a GPU: of whole matrices, or of their rows and columns, and the factors of lines.

    matrix_amax    values [n, R, C] -> of each matrix; a history that already knows the scale spares the reading
    line_amaxes    values [n, R, C] -> of each row, and of each column within its expert
    line_factors   amaxes -> factors and scales

Magnitudes are compared as integers: for floats without sign the order is the same, an infinity stands above all finite
numbers and NaN above it, so that neither is lost, and the order in which programs arrive does not matter.

Rows may belong to experts that end at `ends` int32 [E]; the undefined rows behind the last one's count as zeros. Rows
of one expert begin at multiples of 16.

Legend: n matrices (1 for activations), R rows, C columns, E experts.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
# ruff: noqa: SIM102 (and a constant condition of its own)
import torch

from megatron.core import streams
from megatron.core.fusions.fp8_blocks import magnitude
from megatron.core.optional_deps import tl, triton_jit

_ROWS_OF_OWNER = 16  # rows of one expert are a multiple of this
_CHUNK_ROWS, _CHUNK_COLUMNS = 512, 256  # of a program that looks at lines
_FACTORS = 1024  # made by one program


def matrix_amax(
    values: torch.Tensor,
    ends: torch.Tensor | None = None,
    past: torch.Tensor | None = None,
    is_shared: bool = False,
) -> torch.Tensor:
    """Largest magnitudes of values [n, R, C] as the bits int32 [n] of fp32, or [1] of all matrices together.

    Nothing is read, and the result is 0, if `past` fp32 [] is there and above 0. Host: no synchronisation.
    """
    num_matrices, num_rows, num_columns = values.shape
    found = torch.zeros(1 if is_shared else num_matrices, dtype=torch.int32, device=values.device)
    if values.numel():
        tile_rows = 64
        streams.declare("fp8 amax", (values, ends, past, found), (found,))
        _matrix_kernel[(-(-num_rows // tile_rows), num_matrices)](
            values,
            found,
            ends,
            past,
            values.stride(0),
            values.stride(1),
            num_rows,
            num_columns,
            0 if ends is None else ends.numel(),
            IS_SHARED=is_shared,
            ROWS=tile_rows,
            COLUMNS=128,
            num_warps=8,
        )
    return found


def line_amaxes(
    values: torch.Tensor, ends: torch.Tensor | None = None, by_row: bool = True, by_column: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Bits int32 of the largest magnitudes of values [n, R, C]: by row [n, R]; by column [n, C], in experts [E, C].

    Host: no synchronisation.
    """
    num_matrices, num_rows, num_columns = values.shape
    num_groups = num_matrices if ends is None else ends.numel()
    sizes = [num_matrices * num_rows if by_row else 0, num_groups * num_columns if by_column else 0]
    flat = torch.zeros(sum(sizes), dtype=torch.int32, device=values.device)
    of_rows, of_columns = flat.split(sizes)
    if values.numel():
        grid = (-(-num_rows // _CHUNK_ROWS), -(-num_columns // _CHUNK_COLUMNS), num_matrices)
        streams.declare("fp8 line amaxes", (values, ends, flat), (flat,))
        _line_kernel[grid](
            values,
            of_rows,
            of_columns,
            ends,
            values.stride(0),
            values.stride(1),
            num_rows,
            num_columns,
            0 if ends is None else ends.numel(),
            EXPERTS=2 if ends is None else max(2, 1 << (ends.numel() - 1).bit_length()),
            BY_ROW=by_row,
            BY_COLUMN=by_column,
            CHUNK=_CHUNK_ROWS,
            ROWS=_ROWS_OF_OWNER,
            COLUMNS=_CHUNK_COLUMNS,
            num_warps=8,
        )
    rows = of_rows.view(num_matrices, num_rows) if by_row else None
    return rows, of_columns.view(num_groups, num_columns) if by_column else None


def line_factors(amaxes: torch.Tensor, max_code: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors and scales fp32 [...] from bits of amaxes int32 [...]. Host: no synchronisation."""
    factor, scale = (torch.empty_like(amaxes, dtype=torch.float32) for _ in range(2))
    if amaxes.numel():
        streams.declare("fp8 factors", (amaxes,), (factor, scale))
        _factor_kernel[(-(-amaxes.numel() // _FACTORS),)](
            amaxes, factor, scale, amaxes.numel(), MAX_CODE=max_code, BLOCK=_FACTORS
        )
    return factor, scale


@triton_jit
def factor_of_bits(bits, MAX_CODE: tl.constexpr):
    """Bits of amaxes int32 [...] -> factors fp32 [...]: `quantize.factor_of`."""
    amax = bits.to(tl.float32, bitcast=True)
    factor = tl.minimum(tl.div_rn(tl.full(amax.shape, MAX_CODE, tl.float32), amax), 8.507059173023462e37)  # 2^126
    factor = tl.where(bits > 0, factor, 1.0)
    return tl.where(bits >= 0x7F800000, float("nan"), factor)


@triton_jit
def last_row(ends, num_rows, num_experts):
    """End of the rows that count."""
    if ends is None:
        return num_rows
    else:  # noqa: RET505 (a constant condition needs both branches)
        return tl.minimum(tl.load(ends + num_experts - 1), num_rows)


@triton_jit
def _matrix_kernel(
    values,
    found,
    ends,
    past,
    matrix_stride,
    row_stride,
    num_rows,
    num_columns,
    num_experts,
    IS_SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some rows of one matrix of values [n, R, C], all columns."""
    is_needed = True
    if past is not None:
        is_needed = not tl.load(past) > 0.0
    if is_needed:
        matrix = tl.program_id(1)
        first = tl.program_id(0) * ROWS
        rows = tl.arange(0, ROWS)
        is_row = first + rows < last_row(ends, num_rows, num_experts)
        start = values + matrix.to(tl.int64) * matrix_stride + first.to(tl.int64) * row_stride
        largest = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
        for begin in tl.range(0, num_columns, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)
            mask = is_row[:, None] & (columns < num_columns)[None, :]
            x = tl.load(start + (rows[:, None] * row_stride + columns[None, :]), mask=mask, other=0.0)
            largest = tl.maximum(largest, magnitude(x.to(tl.float32)))
        place = found if IS_SHARED else found + matrix
        tl.atomic_max(place, tl.max(tl.max(largest, axis=1), axis=0))


@triton_jit
def _line_kernel(
    values,
    row_amax,
    column_amax,
    ends,
    matrix_stride,
    row_stride,
    num_rows,
    num_columns,
    num_experts,
    EXPERTS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A chunk of rows and columns of one matrix [R, C]; a tile of ROWS rows has one owner."""
    matrix = tl.program_id(2)
    begin, columns = tl.program_id(0) * CHUNK, tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    last, is_column = last_row(ends, num_rows, num_experts), columns < num_columns
    start = values + matrix.to(tl.int64) * matrix_stride + begin.to(tl.int64) * row_stride
    inner = tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    group, group_end = matrix, last
    if ends is not None:
        known = tl.load(ends + experts, mask=experts < num_experts, other=0x7FFFFFFF)
        group = tl.sum((known <= begin).to(tl.int32), axis=0)
        group_end = tl.min(tl.where(known > begin, known, 0x7FFFFFFF), axis=0)
    largest = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for step in tl.range(0, tl.minimum(CHUNK, last - begin), ROWS):
        if ends is not None:
            if begin + step >= group_end:
                if BY_COLUMN:
                    tl.atomic_max(column_amax + group * num_columns + columns, tl.max(largest, axis=0), mask=is_column)
                largest = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
                group = tl.sum((known <= begin + step).to(tl.int32), axis=0)
                group_end = tl.min(tl.where(known > begin + step, known, 0x7FFFFFFF), axis=0)
        rows = step + inner
        mask = (begin + rows < last)[:, None] & is_column[None, :]
        x = tl.load(start + (rows[:, None] * row_stride + columns[None, :]), mask=mask, other=0.0)
        bits = magnitude(x.to(tl.float32))
        if BY_ROW:
            place = row_amax + matrix.to(tl.int64) * num_rows + begin + rows
            tl.atomic_max(place, tl.max(bits, axis=1), mask=begin + rows < last)
        largest = tl.maximum(largest, bits)
    if BY_COLUMN:
        if begin < last:
            tl.atomic_max(column_amax + group * num_columns + columns, tl.max(largest, axis=0), mask=is_column)


@triton_jit
def _factor_kernel(amaxes, factor, scale, count, MAX_CODE: tl.constexpr, BLOCK: tl.constexpr):
    """Factors and scales fp32 [count] of bits int32 [count]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    made = factor_of_bits(tl.load(amaxes + at, mask=at < count, other=0), MAX_CODE)
    tl.store(factor + at, made, mask=at < count)
    tl.store(scale + at, tl.div_rn(tl.full(made.shape, 1.0, tl.float32), made), mask=at < count)
