"""Tiles of SwiGLU's result and of its gradient, computed in registers, and the largest magnitude of all of them.

What is computed is rounded to the dtype of the input, as if it had been written. See `fp8_swiglu`.

Legend: R rows, f inner width, E experts whose rows end at `ends`.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
import dataclasses
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.fp8_amax import last_row
from megatron.core.fusions.fp8_blocks import magnitude
from megatron.core.fusions.fp8_quantize import CastCut, Given, largest_of, note_amax, tile_place
from megatron.core.fusions.fused_swiglu import swiglu, swiglu_gradients
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

_CUT, _PROGRAMS = CastCut(high=16, columns=64, num_warps=4), 1024


def with_amax(
    given: Given,
    kernel: Any,
    operands: tuple[torch.Tensor | None, ...],
    ends: torch.Tensor,
    shape: tuple[int, int],
) -> Given:
    """Add the amax that a scale of the matrix takes where a history has none: bits int32 [1], 0 if it is not needed.

    `operands` [R, ...] are those of `kernel`, `shape` is [R, f].
    """
    found = torch.zeros(1, dtype=torch.int32, device=ends.device)
    streams.declare("fp8 swiglu amax", (*operands, ends, given.past, found), (found,))
    tiles = -(-shape[0] // (_CUT.high * _CUT.low)) * -(-shape[1] // _CUT.columns)
    num_programs = min(tiles, _PROGRAMS)
    kernel[(num_programs,)](
        *operands,
        found,
        given.past,
        ends,
        *shape,
        ends.numel(),
        tiles,
        NUM_PROGRAMS=num_programs,
        HIGH=_CUT.high,
        LOW=_CUT.low,
        COLUMNS=_CUT.columns,
        INTERPRETED=is_interpreted(),
        num_warps=_CUT.num_warps,
    )
    return dataclasses.replace(given, amax=found)


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
def product_tile(
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
def gradient_tile(
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
def forward_amax_kernel(
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
            y = product_tile(x, probs, first_row, first_column, last, width, HIGH, LOW, COLUMNS, INTERPRETED)
            largest = tl.maximum(largest, magnitude(y))
        note_amax(largest_of(largest), found)


@triton_jit
def backward_amax_kernel(
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
            grad_gate, grad_up, _ = gradient_tile(
                grad, x, probs, first_row, first_column, last, width, HIGH, LOW, COLUMNS, INTERPRETED
            )
            largest = tl.maximum(largest, tl.maximum(magnitude(grad_gate), magnitude(grad_up)))
        note_amax(largest_of(largest), found)
