"""Products of 8-bit codes with scales, expert by expert, on a GPU.

    grouped rows    out[r]  = rows[r] weight[e(r)]^T                 rows [R, K], weight [n, N, K] -> [R, N]
    grouped wgrad   main[e] += grad^T[:, rows of e] rows^T[:, rows of e]^T     [out, R], [in, R] -> [n, out, in] fp32

Tensor cores take 8-bit operands only if both lie contiguous along the sum; so the weight gradient takes transposed
copies. Scales come in two forms:

    lines    one for each line of an operand: applied once to the finished sum
    strips   one for 128 elements along the sum (for a weight: for 128 x 128): applied to each partial sum of 128

Fast accumulation leaves the sum in the tensor core, which keeps fewer bits than fp32; precise accumulation and strips
add partial sums of 128 products in fp32.

Group ends are read on the device. An expert without rows costs a comparison. In the weight gradient the last columns
of an expert, fewer than a block, come with those of the next one, which are set to zero in one operand. With strips,
experts begin at multiples of 128 and the codes behind the last one are zeros: whole blocks are read.

The weight gradient with scales of lines runs in `ring_wgrad` where that can.

Legend: R rows, n experts, N, out and in features, K the size of a sum.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from dataclasses import dataclass

import torch

from megatron.core import streams
from megatron.core.fusions.grouped_wgrad import described, num_free_sms
from megatron.core.fusions.ring_wgrad import Operand, can_run_ring, ring_wgrad
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

STRIP = 128
"""Elements along the sum that share a scale, and that are added up before they enter an fp32 sum."""

_LINE_BYTES = 128


@dataclass(frozen=True)
class Cut:
    """How the kernels are cut; changes speed, not results."""

    block_rows: int = 128
    """Rows of a tile; of a weight gradient's tile, output features."""
    block_out: int = 128
    """Columns of a tile."""
    band: int = 16
    """Tiles along the first dimension that are walked before the next along the second."""
    num_warps: int = 8
    num_stages: int = 4
    programs_per_sm: int = 1
    """Weight gradient only."""
    prefetches: bool = True
    """Weight gradient only: bring what a tile is added to into the cache while its products run."""


# From `tools/benchmark/fp8.py --what sweep`.
FAST, PRECISE = Cut(block_out=256, num_stages=3), Cut(64, 128, num_warps=4)
LONG_STRIPS, SHORT_STRIPS = Cut(band=8), Cut(64, 128, num_warps=4)
WGRAD_LINES = Cut(64, 128, num_warps=4, programs_per_sm=2)
WGRAD_STRIPS = Cut(128, 64, num_warps=4, programs_per_sm=2)
_SHORT_SUM = 2048


def _cut_of_rows(width: int, has_strips: bool, is_fast: bool) -> Cut:
    """Cut of the rows product for a sum of `width`."""
    if has_strips:
        return SHORT_STRIPS if width <= _SHORT_SUM else LONG_STRIPS
    return FAST if is_fast else PRECISE


@dataclass(frozen=True)
class ScaledCodes:
    """One operand."""

    codes: torch.Tensor
    """fp8 [lines, sum], or [n, lines, sum] for the weights of n experts."""

    scale: torch.Tensor
    """fp32. Lines: [lines], [n, lines]. Strips: [lines, sum / 128] with neighbouring lines side by side in memory; of
    weights [n, N / 128, K / 128]."""


def grouped_rows_product(
    rows: ScaledCodes,
    weight: ScaledCodes,
    ends: torch.Tensor,
    dtype: torch.dtype,
    *,
    has_strips: bool,
    is_fast: bool,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Rows [R, K] times the weights [n, N, K] transposed, row ends int32 [n] -> [R, N] in `dtype`.

    Host:  no synchronisation. Graph: capturable.
    """
    (num_rows, width), (num_experts, num_out, _) = rows.codes.shape, weight.codes.shape
    out = torch.empty(num_rows, num_out, dtype=dtype, device=rows.codes.device)
    if not out.numel():
        return out
    is_precise = has_strips or not is_fast
    cut = cut or _cut_of_rows(width, has_strips, is_fast)
    assert not has_strips or STRIP % cut.block_out == 0, f"block_out={cut.block_out}: a tile has one strip of weights"
    row_tiles = -(-num_rows // cut.block_rows) + num_experts  # each expert may leave one tile unfilled
    matrix = weight.codes.view(num_experts * num_out, width)
    strides = (rows.scale.stride(1), *weight.scale.stride()) if has_strips else (0, num_out, 0, 0)
    interpreted = is_interpreted()
    streams.declare("fp8 rows", (rows.codes, matrix, rows.scale, weight.scale, ends), (out,))
    _rows_kernel[(row_tiles * -(-num_out // cut.block_out),)](
        described(rows.codes, [cut.block_rows, STRIP]),
        described(matrix, [cut.block_out, STRIP]),
        out,
        rows.scale,
        weight.scale,
        ends,
        *strides,
        num_experts,
        num_out,
        width,
        row_tiles,
        EXPERTS=max(2, 1 << (num_experts - 1).bit_length()),
        BLOCK_ROWS=cut.block_rows,
        BLOCK_OUT=cut.block_out,
        STRIP=STRIP,
        BAND=cut.band,
        HAS_STRIPS=has_strips,
        IS_PRECISE=is_precise,
        INTERPRETED=interpreted,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    return out


def grouped_wgrad_product(
    main_grad: torch.Tensor,
    grad: ScaledCodes,
    rows: ScaledCodes,
    ends: torch.Tensor,
    *,
    has_strips: bool,
    is_fast: bool = False,
    cut: Cut | None = None,
) -> None:
    """Add to main_grad [n, out, in]: grad [out, R], rows [in, R], row ends int32 [n].

    Lines have scales [n, out] and [n, in]. Experts begin at multiples of 16 rows, with strips of 128.
    Host: no synchronisation. Graph: capturable.
    """
    num_experts, num_out, num_in = main_grad.shape
    num_rows = grad.codes.shape[1]
    if not num_rows or not main_grad.numel():
        return
    is_precise = has_strips or not is_fast
    if cut is None and is_precise and not has_strips and can_run_ring(main_grad):
        left, right = Operand(grad.codes, grad.scale), Operand(rows.codes, rows.scale)
        ring_wgrad(main_grad, left, right, ends, num_free_sms(main_grad.device))
        return
    cut = cut or (WGRAD_STRIPS if has_strips else WGRAD_LINES)
    strides = (grad.scale.stride(1), rows.scale.stride(1)) if has_strips else (num_out, num_in)
    num_programs = cut.programs_per_sm * num_free_sms(main_grad.device)
    interpreted = is_interpreted()
    operands = (grad.codes, rows.codes, grad.scale, rows.scale, ends)
    streams.declare("fp8 wgrad", (*operands, main_grad), (main_grad,))
    _wgrad_kernel[(num_programs,)](
        described(grad.codes, [cut.block_rows, STRIP]),
        described(rows.codes, [cut.block_out, STRIP]),
        main_grad,
        grad.scale,
        rows.scale,
        ends,
        *strides,
        main_grad.stride(0),
        num_experts,
        num_out,
        num_in,
        BLOCK_OUT=cut.block_rows,
        BLOCK_IN=cut.block_out,
        STRIP=STRIP,
        BAND=cut.band,
        LINE=0 if interpreted or not cut.prefetches else _LINE_BYTES // main_grad.element_size(),
        NUM_PROGRAMS=num_programs,
        HAS_STRIPS=has_strips,
        IS_PRECISE=is_precise,
        INTERPRETED=interpreted,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )


@triton_jit
def _product(
    total,
    left,
    right,
    IS_PRECISE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Total [a, b] + left [a, k] right [b, k]^T."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    if IS_PRECISE:
        return total + tl.dot(left, tl.trans(right))
    else:  # noqa: RET505
        return tl.dot(left, tl.trans(right), total)


@triton_jit
def _place(tile, tiles_down, tiles_across, BAND: tl.constexpr):
    """Number of a tile -> (down, across): bands of tiles, so that programs side by side share operands."""
    top = tile // (BAND * tiles_across) * BAND
    height = tl.minimum(tiles_down - top, BAND)
    inside = tile % (BAND * tiles_across)
    return top + inside % height, inside // height


@triton_jit
def _rows_kernel(
    rows_desc,
    weight_desc,
    out,
    row_scale,
    weight_scale,
    ends,
    row_strip_stride,
    weight_expert_stride,
    weight_out_stride,
    weight_sum_stride,
    num_experts,
    num_out,
    width,
    row_tiles,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    STRIP: tl.constexpr,
    BAND: tl.constexpr,
    HAS_STRIPS: tl.constexpr,
    IS_PRECISE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of out [R, N]; tiles of rows are counted expert by expert, those behind the last expert do nothing."""
    row_tile, out_tile = _place(tl.program_id(0), row_tiles, tl.cdiv(num_out, BLOCK_OUT), BAND)
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    lasts = tl.load(ends + experts, mask=is_expert, other=0)
    firsts = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
    tiles = tl.where(is_expert, (lasts - firsts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= row_tile).to(tl.int32), axis=0)
    if expert < num_experts:
        begin = tl.sum(tl.where(experts == expert, firsts, 0), axis=0)
        end = tl.sum(tl.where(experts == expert, lasts, 0), axis=0)
        tiles_before = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
        first_row = begin + (row_tile - tiles_before) * BLOCK_ROWS
        first_out = out_tile * BLOCK_OUT
        rows, outs = first_row + tl.arange(0, BLOCK_ROWS), first_out + tl.arange(0, BLOCK_OUT)
        is_row, is_out = rows < end, outs < num_out
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
        for strip in tl.range(0, tl.cdiv(width, STRIP)):
            left = rows_desc.load([first_row, strip * STRIP])
            right = weight_desc.load([expert * num_out + first_out, strip * STRIP])
            if HAS_STRIPS:
                spot = weight_scale + expert * weight_expert_stride
                spot += first_out // STRIP * weight_out_stride + strip * weight_sum_stride
                scale = tl.load(row_scale + strip * row_strip_stride + rows, mask=is_row, other=0.0) * tl.load(spot)
                part = _product(tl.zeros_like(total), left, right, False, INTERPRETED)
                total += part * scale[:, None]
            else:
                total = _product(total, left, right, IS_PRECISE, INTERPRETED)
        if not HAS_STRIPS:
            total *= tl.load(row_scale + rows, mask=is_row, other=0.0)[:, None]
            total *= tl.load(weight_scale + expert * weight_expert_stride + outs, mask=is_out, other=0.0)[None, :]
        spot = out + rows.to(tl.int64)[:, None] * num_out + outs[None, :]
        tl.store(spot, narrow(total, out.dtype.element_ty, INTERPRETED), mask=is_row[:, None] & is_out[None, :])


@triton_jit
def _prefetch(lines):
    """Ask for lines of 128 bytes at addresses [...]."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@triton_jit
def _wgrad_kernel(
    grad_desc,
    rows_desc,
    main,
    grad_scale,
    row_scale,
    ends,
    grad_scale_stride,
    row_scale_stride,
    main_stride,
    num_experts,
    num_out,
    num_in,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STRIP: tl.constexpr,
    BAND: tl.constexpr,
    LINE: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    HAS_STRIPS: tl.constexpr,
    IS_PRECISE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The tiles of this program: grad [out, R], rows [in, R] -> main [n, out, in]."""
    tiles_out, tiles_in = tl.cdiv(num_out, BLOCK_OUT), tl.cdiv(num_in, BLOCK_IN)
    for tile in tl.range(tl.program_id(0), num_experts * tiles_out * tiles_in, NUM_PROGRAMS):
        expert = tile // (tiles_out * tiles_in)
        begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        if begin < end:
            out_tile, in_tile = _place(tile % (tiles_out * tiles_in), tiles_out, tiles_in, BAND)
            first_out, first_in = out_tile * BLOCK_OUT, in_tile * BLOCK_IN
            outs, ins = first_out + tl.arange(0, BLOCK_OUT), first_in + tl.arange(0, BLOCK_IN)
            is_out, is_in = outs < num_out, ins < num_in
            if LINE > 0:
                lines = main + expert.to(tl.int64) * main_stride
                lines += tl.minimum(outs, num_out - 1).to(tl.int64)[:, None] * num_in
                _prefetch(lines + tl.minimum(first_in + tl.arange(0, BLOCK_IN // LINE) * LINE, num_in - 1)[None, :])
            total = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
            num_blocks = (end - begin) // STRIP
            if HAS_STRIPS:  # only the last expert may end within a strip; zeros follow it
                num_blocks = tl.cdiv(end - begin, STRIP)
            for block in tl.range(0, num_blocks):
                row = begin + block * STRIP
                left = grad_desc.load([first_out, row])
                right = rows_desc.load([first_in, row])
                if HAS_STRIPS:
                    part = _product(tl.zeros_like(total), left, right, False, INTERPRETED)
                    left_scale = tl.load(grad_scale + row // STRIP * grad_scale_stride + outs, mask=is_out, other=0.0)
                    right_scale = tl.load(row_scale + row // STRIP * row_scale_stride + ins, mask=is_in, other=0.0)
                    total += part * left_scale[:, None] * right_scale[None, :]
                else:
                    total = _product(total, left, right, IS_PRECISE, INTERPRETED)
            first = begin + num_blocks * STRIP
            if not HAS_STRIPS:
                if first < end:
                    left = grad_desc.load([first_out, first])
                    right = rows_desc.load([first_in, first])
                    is_own = first + tl.arange(0, STRIP) < end
                    codes = tl.where(is_own[None, :], left.to(tl.uint8, bitcast=True), 0).to(tl.uint8)
                    total = _product(total, codes.to(left.dtype, bitcast=True), right, IS_PRECISE, INTERPRETED)
                total *= tl.load(grad_scale + expert * grad_scale_stride + outs, mask=is_out, other=0.0)[:, None]
                total *= tl.load(row_scale + expert * row_scale_stride + ins, mask=is_in, other=0.0)[None, :]
            start = main + expert.to(tl.int64) * main_stride + first_out.to(tl.int64) * num_in + first_in
            halves = tl.permute(tl.reshape(total, (BLOCK_OUT, 2, BLOCK_IN // 2)), (0, 2, 1))
            near, far = tl.split(halves)
            for half in tl.static_range(2):
                part = near if half == 0 else far
                down, across = (
                    tl.arange(0, BLOCK_OUT)[:, None],
                    (tl.arange(0, BLOCK_IN // 2) + half * (BLOCK_IN // 2))[None, :],
                )
                mask = (first_out + down < num_out) & (first_in + across < num_in)
                spot = start + (down * num_in + across)
                before = tl.load(spot, mask=mask, other=0.0).to(tl.float32)
                value = narrow(before + part, main.dtype.element_ty, INTERPRETED)
                tl.store(spot, value, mask=mask)
