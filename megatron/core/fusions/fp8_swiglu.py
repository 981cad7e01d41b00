"""SwiGLU of experts and its gradients as 8-bit codes, on a GPU: what lies between the two products of FP8 experts.

    forward    x [R, 2f], p [R]   -> codes of y [R, f]              y = silu(gate) * up * p
    backward   dy [R, f], x, p    -> codes of d x [R, 2f], d p [R]

y and d x are rounded to the dtype of x and then quantised, and never written: the codes are those of `fused_swiglu` and
`fp8_quantize` one after the other, bit for bit. Codes come in both orientations from one reading. A scale of whole
matrices that no history knows takes a reading of its own, which computes the values and keeps their largest magnitude.

d p is summed in a fixed order, within a tile's columns and then over the tiles, so that a run repeats bit for bit.

Rows behind the last expert's are not read: their codes and d p are zeros.

Legend: R rows, f inner width, E experts whose rows end at `ends`.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
import dataclasses
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.fp8_amax import last_row
from megatron.core.fusions.fp8_blocks import magnitude
from megatron.core.fusions.fp8_quantize import (
    BLOCK,
    CastCut,
    Codes,
    Given,
    Mode,
    cast_tile,
    finished_codes,
    has_quantize_kernels,
    largest_of,
    new_codes,
    note_amax,
    tile_place,
)
from megatron.core.fusions.fused_swiglu import swiglu, swiglu_gradients
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

FORWARD_CUTS = {Mode.MATRIX: CastCut(high=16, num_warps=8), Mode.STRIPS: CastCut(num_warps=16)}
BACKWARD_CUTS = {Mode.MATRIX: CastCut(high=16, num_warps=8), Mode.STRIPS: CastCut(num_warps=16)}
"""Mode -> cut, from `tools/benchmark/fp8.py --what swiglu`. Strips fix the tile: 128 x 128."""

_AMAX_CUT, _AMAX_PROGRAMS = CastCut(high=16, columns=64, num_warps=4), 1024
_KERNEL_BYTES = 2
"""of an element. Of fp32 codes by column are put in wrong places, see `kernel_operand`."""


def has_swiglu_codes(x: torch.Tensor, mode: Mode) -> bool:
    """True where the kernels run: x [R, 2f] on a GPU with 16 bits, scales of matrices or of whole strips."""
    if not has_quantize_kernels(x) or x.element_size() != _KERNEL_BYTES or not x.is_contiguous() or not x.numel():
        return False
    return mode is Mode.MATRIX or (mode is Mode.STRIPS and x.shape[1] % (2 * BLOCK) == 0)


def swiglu_codes(
    x: torch.Tensor,
    probs: torch.Tensor | None,
    dtype: torch.dtype,
    mode: Mode,
    given: Given,
    ends: torch.Tensor,
    *,
    by_column: bool = True,
    cut: CastCut | None = None,
) -> Codes:
    """Quantise y: x [R, 2f], probs [R] or None for ones, ends int32 [E] -> codes of [1, R, f].

    Of `given` the history counts; the amax is found here. Host: no synchronisation. Graph: capturable.
    """
    num_rows, width = x.shape[0], x.shape[1] // 2
    given = _with_amax(given, mode, _forward_amax_kernel, (x, probs), ends, (num_rows, width))
    raw = new_codes(torch.Size((1, num_rows, width)), x.device, mode, by_row=True, by_column=by_column)
    cut = cut or FORWARD_CUTS[mode]
    _declare("fp8 swiglu", (x, probs), given, ends, raw)
    _forward_kernel[_grid(num_rows, width, cut)](
        x,
        probs,
        *_operands(raw, given, ends),
        num_rows,
        width,
        ends.numel(),
        **_options(mode, given, dtype, by_column, cut),
    )
    return finished_codes(raw, dtype, mode)


def swiglu_gradient_codes(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    dtype: torch.dtype,
    mode: Mode,
    given: Given,
    ends: torch.Tensor,
    *,
    by_column: bool = True,
    cut: CastCut | None = None,
) -> tuple[Codes, torch.Tensor | None]:
    """Quantise d x: operands dy [R, f], x [R, 2f], probs [R] or None -> codes of [1, R, 2f], and d p [R] or None.

    Of `given` the history counts; the amax is found here. Host: no synchronisation. Graph: capturable.
    """
    grad, x, probs = operands
    num_rows, width = grad.shape
    given = _with_amax(given, mode, _backward_amax_kernel, operands, ends, (num_rows, width))
    raw = new_codes(torch.Size((1, num_rows, 2 * width)), x.device, mode, by_row=True, by_column=by_column)
    cut = cut or BACKWARD_CUTS[mode]
    parts = None
    if probs is not None:
        parts = torch.empty(-(-width // cut.columns), num_rows, dtype=torch.float32, device=x.device)
    _declare("fp8 swiglu backward", operands, given, ends, raw, parts)
    _backward_kernel[_grid(num_rows, width, cut)](
        *operands,
        parts,
        *_operands(raw, given, ends),
        num_rows,
        width,
        ends.numel(),
        **_options(mode, given, dtype, by_column, cut),
    )
    grad_probs = None if parts is None or probs is None else parts.sum(0).to(probs.dtype)
    return finished_codes(raw, dtype, mode), grad_probs


def _with_amax(
    given: Given,
    mode: Mode,
    kernel: Any,
    operands: tuple[torch.Tensor | None, ...],
    ends: torch.Tensor,
    shape: tuple[int, int],
) -> Given:
    """Add the amax that scales of matrices take where a history has none: bits int32 [1], 0 if it is not needed.

    `operands` [R, ...] are those of `kernel`, `shape` is [R, f].
    """
    if mode is not Mode.MATRIX:
        return given
    found = torch.zeros(1, dtype=torch.int32, device=ends.device)
    streams.declare("fp8 swiglu amax", (*operands, ends, given.past, found), (found,))
    tiles = _grid(*shape, _AMAX_CUT)[0]
    num_programs = min(tiles, _AMAX_PROGRAMS)
    kernel[(num_programs,)](
        *operands,
        found,
        given.past,
        ends,
        *shape,
        ends.numel(),
        tiles,
        NUM_PROGRAMS=num_programs,
        HIGH=_AMAX_CUT.high,
        LOW=_AMAX_CUT.low,
        COLUMNS=_AMAX_CUT.columns,
        INTERPRETED=is_interpreted(),
        num_warps=_AMAX_CUT.num_warps,
    )
    return dataclasses.replace(given, amax=found)


def _grid(num_rows: int, width: int, cut: CastCut) -> tuple[int]:
    """Tiles of [R, f]."""
    return (-(-num_rows // (cut.high * cut.low)) * -(-width // cut.columns),)


def _declare(
    name: str,
    operands: tuple[torch.Tensor | None, ...],
    given: Given,
    ends: torch.Tensor,
    raw: Codes,
    parts: torch.Tensor | None = None,
) -> None:
    """Say what a kernel reads and writes: operands [R, ...], ends int32 [E], parts of d p [tiles, R]."""
    outputs = (raw.rows, raw.columns, raw.row_scale, raw.column_scale, given.noted, parts)
    streams.declare(name, (*operands, ends, given.amax, given.past, given.noted), outputs)


def _operands(raw: Codes, given: Given, ends: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Operands that both kernels take in this order; ends int32 [E]."""
    noted = None if given.noted is None else given.noted.view(torch.int32)
    return raw.rows, raw.columns, raw.row_scale, raw.column_scale, given.amax, given.past, noted, ends


def _options(mode: Mode, given: Given, dtype: torch.dtype, by_column: bool, cut: CastCut) -> dict[str, Any]:
    """Constants of both kernels."""
    return {
        "MODE": int(mode),
        "BY_COLUMN": by_column,
        "SHRINK": 2.0**-given.margin,
        "IS_E5M2": dtype == torch.float8_e5m2,
        "HIGH": cut.high,
        "LOW": cut.low,
        "COLUMNS": cut.columns,
        "BAND": cut.band,
        "INTERPRETED": is_interpreted(),
        "num_warps": cut.num_warps,
        "maxnreg": cut.max_registers,
    }


@triton_jit
def _tile(
    values,
    first_row,
    first_column,
    last,
    width,
    stride,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Values [R, width] of a tile in fp32 [HIGH, LOW, COLUMNS]; zeros from row `last` on."""
    row = tl.arange(0, HIGH)[:, None, None] * LOW + tl.arange(0, LOW)[None, :, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    mask = (first_row + row < last) & (first_column + column < width)
    start = values + first_row.to(tl.int64) * stride + first_column
    return tl.load(start + (row * stride + column), mask=mask, other=0.0).to(tl.float32)


@triton_jit
def _weights(probs, first_row, last, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Weights of rows in fp32 [HIGH, LOW, 1]; zeros from row `last` on."""
    row = first_row + tl.arange(0, HIGH * LOW)
    return tl.reshape(tl.load(probs + row, mask=row < last, other=0.0).to(tl.float32), (HIGH, LOW, 1))


@triton_jit
def _product_tile(
    x,
    probs,
    first_row,
    first_column,
    last,
    width,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile of y, rounded, in fp32 [HIGH, LOW, COLUMNS]."""
    gate = _tile(x, first_row, first_column, last, width, 2 * width, HIGH, LOW, COLUMNS)
    up = _tile(x + width, first_row, first_column, last, width, 2 * width, HIGH, LOW, COLUMNS)
    y = swiglu(gate, up)
    if probs is not None:
        y *= _weights(probs, first_row, last, HIGH, LOW)
    return narrow(y, x.dtype.element_ty, INTERPRETED).to(tl.float32)


@triton_jit
def _gradient_tile(
    grad,
    x,
    probs,
    first_row,
    first_column,
    last,
    width,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Tiles of d gate and d up, rounded, and the terms of d p, in fp32 [HIGH, LOW, COLUMNS]."""
    gate = _tile(x, first_row, first_column, last, width, 2 * width, HIGH, LOW, COLUMNS)
    up = _tile(x + width, first_row, first_column, last, width, 2 * width, HIGH, LOW, COLUMNS)
    dy = _tile(grad, first_row, first_column, last, width, width, HIGH, LOW, COLUMNS)
    weighted = dy
    if probs is not None:
        weighted = dy * _weights(probs, first_row, last, HIGH, LOW)
    grad_gate, grad_up, activated = swiglu_gradients(gate, up, weighted)
    grad_gate = narrow(grad_gate, x.dtype.element_ty, INTERPRETED).to(tl.float32)
    grad_up = narrow(grad_up, x.dtype.element_ty, INTERPRETED).to(tl.float32)
    return grad_gate, grad_up, dy * activated * up


@triton_jit
def _forward_amax_kernel(
    x,
    probs,
    found,
    past,
    ends,
    num_rows,
    width,
    num_experts,
    num_tiles,
    NUM_PROGRAMS: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Every NUM_PROGRAMS-th tile of y, if no amax is known."""
    is_needed = True
    if past is not None:
        is_needed = not tl.load(past) > 0.0
    if is_needed:
        last = last_row(ends, num_rows, num_experts)
        largest = tl.zeros((HIGH, LOW, COLUMNS), dtype=tl.int32)
        for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS):
            row_tile, column_tile = tile_place(tile, num_rows, width, HIGH * LOW, COLUMNS, 1)
            first_row, first_column = row_tile * (HIGH * LOW), column_tile * COLUMNS
            y = _product_tile(x, probs, first_row, first_column, last, width, HIGH, LOW, COLUMNS, INTERPRETED)
            largest = tl.maximum(largest, magnitude(y))
        note_amax(largest_of(largest), found)


@triton_jit
def _backward_amax_kernel(
    grad,
    x,
    probs,
    found,
    past,
    ends,
    num_rows,
    width,
    num_experts,
    num_tiles,
    NUM_PROGRAMS: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Every NUM_PROGRAMS-th tile of d gate and d up, if no amax is known."""
    is_needed = True
    if past is not None:
        is_needed = not tl.load(past) > 0.0
    if is_needed:
        last = last_row(ends, num_rows, num_experts)
        largest = tl.zeros((HIGH, LOW, COLUMNS), dtype=tl.int32)
        for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS):
            row_tile, column_tile = tile_place(tile, num_rows, width, HIGH * LOW, COLUMNS, 1)
            first_row, first_column = row_tile * (HIGH * LOW), column_tile * COLUMNS
            grad_gate, grad_up, _ = _gradient_tile(
                grad, x, probs, first_row, first_column, last, width, HIGH, LOW, COLUMNS, INTERPRETED
            )
            largest = tl.maximum(largest, tl.maximum(magnitude(grad_gate), magnitude(grad_up)))
        note_amax(largest_of(largest), found)


@triton_jit
def _cast(
    tile,
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
    num_rows,
    num_columns,
    MODE: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    SHRINK: tl.constexpr,
    IS_E5M2: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`cast_tile` of the one matrix [R, C] here."""
    cast_tile(
        tile,
        tl.full((), 0, tl.int64),
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
        None,
        None,
        None,
        num_rows,
        num_columns,
        0,
        MODE,
        True,
        BY_COLUMN,
        2,
        True,
        SHRINK,
        IS_E5M2,
        HIGH,
        LOW,
        COLUMNS,
        INTERPRETED,
    )


@triton_jit
def _forward_kernel(
    x,
    probs,
    row_codes,
    column_codes,
    row_scale,
    column_scale,
    amax,
    past,
    noted,
    ends,
    num_rows,
    width,
    num_experts,
    MODE: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    SHRINK: tl.constexpr,
    IS_E5M2: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of the codes of y [R, f]."""
    row_tile, column_tile = tile_place(tl.program_id(0), num_rows, width, HIGH * LOW, COLUMNS, BAND)
    first_row, first_column = row_tile * (HIGH * LOW), column_tile * COLUMNS
    last = last_row(ends, num_rows, num_experts)
    y = _product_tile(x, probs, first_row, first_column, last, width, HIGH, LOW, COLUMNS, INTERPRETED)
    _cast(
        y,
        first_row,
        first_column,
        width,
        row_codes,
        column_codes,
        row_scale,
        column_scale,
        amax,
        past,
        noted,
        num_rows,
        width,
        MODE,
        BY_COLUMN,
        SHRINK,
        IS_E5M2,
        HIGH,
        LOW,
        COLUMNS,
        INTERPRETED,
    )


@triton_jit
def _backward_kernel(
    grad,
    x,
    probs,
    parts,
    row_codes,
    column_codes,
    row_scale,
    column_scale,
    amax,
    past,
    noted,
    ends,
    num_rows,
    width,
    num_experts,
    MODE: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    SHRINK: tl.constexpr,
    IS_E5M2: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Two tiles of the codes of d x [R, 2f], of gate and up, and their part of d p: parts [tiles, R]."""
    row_tile, column_tile = tile_place(tl.program_id(0), num_rows, width, HIGH * LOW, COLUMNS, BAND)
    first_row, first_column = row_tile * (HIGH * LOW), column_tile * COLUMNS
    last = last_row(ends, num_rows, num_experts)
    grad_gate, grad_up, terms = _gradient_tile(
        grad, x, probs, first_row, first_column, last, width, HIGH, LOW, COLUMNS, INTERPRETED
    )
    if parts is not None:
        row = first_row + tl.arange(0, HIGH)[:, None, None] * LOW + tl.arange(0, LOW)[None, :, None]
        place = parts + column_tile.to(tl.int64) * num_rows + row
        tl.store(place, tl.sum(terms, axis=2, keep_dims=True), mask=row < num_rows)
    if noted is not None:
        note_amax(largest_of(tl.maximum(magnitude(grad_gate), magnitude(grad_up))), noted)
    for half in tl.static_range(2):
        _cast(
            grad_gate if half == 0 else grad_up,
            first_row,
            first_column + half * width,
            width + half * width,
            row_codes,
            column_codes,
            row_scale,
            column_scale,
            amax,
            past,
            None,
            num_rows,
            2 * width,
            MODE,
            BY_COLUMN,
            SHRINK,
            IS_E5M2,
            HIGH,
            LOW,
            COLUMNS,
            INTERPRETED,
        )
