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
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.fp8_amax import last_row
from megatron.core.fusions.fp8_blocks import magnitude
from megatron.core.fusions.fp8_quantize import (
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
from megatron.core.fusions.fp8_swiglu_tiles import (
    backward_amax_kernel,
    forward_amax_kernel,
    gradient_tile,
    product_tile,
    with_amax,
)
from megatron.core.fusions.triton_casts import is_interpreted
from megatron.core.optional_deps import tl, triton_jit

FORWARD_CUTS = {Mode.MATRIX: CastCut(high=16, num_warps=4)}
BACKWARD_CUTS = {Mode.MATRIX: CastCut(high=16, columns=64, num_warps=4, max_registers=None)}
"""Mode -> cut, from `tools/benchmark/fp8.py --what swiglu`."""

_KERNEL_BYTES = 2
"""of an element. Of fp32 codes by column are put in wrong places, see `kernel_operand`."""


def has_swiglu_codes(x: torch.Tensor, mode: Mode) -> bool:
    """True if the kernels here take x [R, 2f] and this mode."""
    is_readable = has_quantize_kernels(x) and x.element_size() == _KERNEL_BYTES and x.is_contiguous()
    return is_readable and x.numel() > 0 and mode in FORWARD_CUTS


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
    given = with_amax(given, forward_amax_kernel, (x, probs), ends, (num_rows, width))
    raw = new_codes(torch.Size((1, num_rows, width)), x.device, mode, by_row=True, by_column=by_column)
    cut = cut or FORWARD_CUTS[mode]
    streams.declare("fp8 swiglu", *_touched((x, probs), given, ends, raw))
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
    given = with_amax(given, backward_amax_kernel, operands, ends, (num_rows, width))
    raw = new_codes(torch.Size((1, num_rows, 2 * width)), x.device, mode, by_row=True, by_column=by_column)
    cut = cut or BACKWARD_CUTS[mode]
    parts = None
    if probs is not None:
        parts = torch.empty(-(-width // cut.columns), num_rows, dtype=torch.float32, device=x.device)
    streams.declare("fp8 swiglu backward", *_touched(operands, given, ends, raw, parts))
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


def _grid(num_rows: int, width: int, cut: CastCut) -> tuple[int]:
    """Tiles of [R, f]."""
    return (-(-num_rows // (cut.high * cut.low)) * -(-width // cut.columns),)


def _touched(
    operands: tuple[torch.Tensor | None, ...],
    given: Given,
    ends: torch.Tensor,
    raw: Codes,
    parts: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
    """What a kernel reads and what it writes: operands [R, ...], ends int32 [E], parts of d p [tiles, R]."""
    outputs = (raw.rows, raw.columns, raw.row_scale, raw.column_scale, given.noted, parts)
    return (*operands, ends, given.amax, given.past, given.noted), outputs


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
    y = product_tile(x, probs, first_row, first_column, last, width, HIGH, LOW, COLUMNS, INTERPRETED)
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
    grad_gate, grad_up, terms = gradient_tile(
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
