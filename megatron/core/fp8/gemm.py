"""Products of quantised matrices: FP8 kernels on a GPU, the same meaning in fp32 on a CPU.

    matmul            A [M, K], B [N, K]                  -> A B^T [M, N]
    grouped_matmul    rows [R, K], weights [n, N, K]      -> each expert's rows times its weight transposed [R, N]
    add_grouped_wgrad dY^T [N, R], X^T [K, R]             adds for each expert the product over its rows to [n, N, K]

Which kernel runs on a GPU:

    matmul            torch's; ours for blocks with e5m2 or of sizes that torch's does not take (whole blocks along the
                      sum, and of a weight four at a time)
    grouped_matmul    torch's for e4m3 with scales of tensors or rows; ours for e5m2, for blocks, and in precise
                      accumulation for experts with few rows, where torch's takes longer
    add_grouped_wgrad ours: it adds in fp32

Fast accumulation leaves partial sums in the tensor core, with fewer bits than fp32; precise accumulation moves them
into fp32 registers every few products. Forward is fast and backward precise. On a CPU both are fp32.

Rows of the result behind the last expert's are undefined. An expert without rows adds nothing.

Legend: M, N, K sizes of a product, R rows sorted by expert, n experts.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from megatron.core import step_guard
from megatron.core.fp8.quantize import Quantized
from megatron.core.fusions.fp8_grouped_gemm import STRIP, ScaledCodes, grouped_rows_product, grouped_wgrad_product

_PIECE = 16  # kernels take sums in multiples of this
_FEW_ROWS = 2048  # of an expert, on average
_BLOCKS_TOGETHER = 4  # torch's kernel reads the scales of a weight's blocks in fours


def matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype, is_fast: bool = False) -> torch.Tensor:
    """Multiply codes [M, K] by codes [N, K] transposed -> [M, N] in `out_dtype`."""
    if not a.codes.is_cuda:
        return (a.dequantize() @ b.dequantize().t()).to(out_dtype)
    if a.block is None:
        return _scaled_mm(a, b, out_dtype, is_fast)
    return (_blocks_mm if _fits_torch(a, b) else _own_blocks_mm)(a, b, out_dtype)


def grouped_matmul(
    rows: Quantized, weights: Quantized, ends: torch.Tensor, out_dtype: torch.dtype, is_fast: bool = False
) -> torch.Tensor:
    """Multiply each expert's rows by its weight: codes [R, K] and [n, N, K], ends int [n] -> [R, N] in `out_dtype`.

    Host: on a GPU no synchronisation.
    """
    if not rows.codes.is_cuda:
        return _grouped_in_fp32(rows, weights, ends, out_dtype)
    has_strips = rows.block is not None
    left = with_spread_scale(rows, len(rows.codes), 1)
    right = with_spread_scale(weights, *weights.codes.shape[:2], 1)
    fits_torch = {rows.codes.dtype, weights.codes.dtype} == {torch.float8_e4m3fn} and out_dtype == torch.bfloat16
    has_few_rows = len(rows.codes) < _FEW_ROWS * len(weights.codes)
    if has_strips or not fits_torch or (has_few_rows and not is_fast):
        return grouped_rows_product(left, right, ends, out_dtype, has_strips=has_strips, is_fast=is_fast)
    return torch._scaled_grouped_mm(
        left.codes,
        right.codes.transpose(1, 2),
        left.scale,
        right.scale,
        offs=ends,
        out_dtype=out_dtype,
        use_fast_accum=is_fast,
    )


def add_grouped_wgrad(main_grad: torch.Tensor, grad: Quantized, rows: Quantized, ends: torch.Tensor) -> None:
    """Add each expert's weight gradient: codes [N, R] and [K, R], ends int [n], to main_grad [n, N, K].

    Host: on a GPU no synchronisation.
    """
    if not grad.codes.is_cuda:
        _add_wgrad_in_fp32(main_grad, grad, rows, ends)
        return
    has_strips = grad.block is not None
    left, right = (with_spread_scale(part, len(main_grad), len(part.codes)) for part in (grad, rows))
    grouped_wgrad_product(main_grad, left, right, ends, has_strips=has_strips)


def with_spread_scale(operand: Quantized, *shape: int) -> ScaledCodes:
    """Scales as the kernels take them: those of tensors or lines written out, of `shape` (a last 1 is dropped)."""
    if operand.block is None:
        scale = operand.scale.expand(shape).contiguous()
        return ScaledCodes(operand.codes, scale.squeeze(-1) if shape[-1] == 1 else scale)
    return ScaledCodes(operand.codes, operand.scale if operand.scale.dim() == 3 else _side_by_side(operand.scale))


def _grouped_in_fp32(rows: Quantized, weights: Quantized, ends: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """`grouped_matmul` on any device: codes [R, K], [n, N, K] -> [R, N].

    Host: reads the ends int [n], but for a step that must not (`step_guard`).
    """
    wide, wide_weights = rows.dequantize(), weights.dequantize()
    if step_guard.active() is not None:
        return torch._grouped_mm(wide, wide_weights.transpose(1, 2), offs=ends).to(out_dtype)
    out = wide.new_zeros(wide.shape[0], wide_weights.shape[1])
    for expert, begin, end in _groups(ends):
        out[begin:end] = wide[begin:end] @ wide_weights[expert].t()
    return out.to(out_dtype)


def _add_wgrad_in_fp32(main_grad: torch.Tensor, grad: Quantized, rows: Quantized, ends: torch.Tensor) -> None:
    """`add_grouped_wgrad` on any device: codes [N, R] and [K, R] into [n, N, K]. Host: as `_grouped_in_fp32`."""
    if step_guard.active() is not None:
        left, right = (_all_columns(part, ends) for part in (grad, rows))
        main_grad.add_(torch._grouped_mm(left, right.t(), offs=ends))
        return
    for expert, begin, end in _groups(ends):
        left, right = (_columns(part, expert, begin, end) for part in (grad, rows))
        main_grad[expert].add_(left @ right.t())


def _all_columns(operand: Quantized, ends: torch.Tensor) -> torch.Tensor:
    """Values fp32 [C, R] of codes whose columns belong to experts that end at int [n]."""
    if operand.block is not None or operand.scale.dim() == 0:
        return operand.dequantize()
    columns = torch.arange(operand.codes.shape[1], device=ends.device, dtype=ends.dtype)
    owner = torch.searchsorted(ends, columns, right=True).clamp(max=len(ends) - 1)
    return operand.codes.float() * operand.scale.index_select(0, owner).t()


def _columns(operand: Quantized, expert: int, begin: int, end: int) -> torch.Tensor:
    """Values fp32 [C, end - begin] of one expert's columns; scales are for experts, for blocks, or one."""
    if operand.block is not None or operand.scale.dim() == 0:
        return operand.dequantize()[:, begin:end]
    return operand.codes[:, begin:end].float() * operand.scale[expert].unsqueeze(1)


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) for ends int [n]. Host: reads them."""
    for expert, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
        yield expert, begin, end


def _scaled_mm(a: Quantized, b: Quantized, out_dtype: torch.dtype, is_fast: bool) -> torch.Tensor:
    """Multiply codes [M, K] and [N, K] with scales of tensors or rows."""
    scale_b = b.scale.t() if b.scale.dim() == 2 else b.scale
    left, right = _whole_pieces(a.codes), _whole_pieces(b.codes)
    return torch._scaled_mm(left, right.t(), a.scale, scale_b, out_dtype=out_dtype, use_fast_accum=is_fast)


def _blocks_mm(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply codes [M, K] with scales of 1 x 128 and [N, K] with scales of 1 x 128 or of 128 x 128."""
    kinds = torch.nn.functional.ScalingType
    is_square = b.block != a.block
    return torch.nn.functional.scaled_mm(
        _whole_pieces(a.codes),
        _whole_pieces(b.codes).t(),
        scale_a=_side_by_side(a.scale),
        scale_recipe_a=kinds.BlockWise1x128,
        scale_b=b.scale.contiguous().t() if is_square else _side_by_side(b.scale),
        scale_recipe_b=kinds.BlockWise128x128 if is_square else kinds.BlockWise1x128,
        output_dtype=out_dtype,
    )


def _fits_torch(a: Quantized, b: Quantized) -> bool:
    """True if torch's kernel takes codes [M, K] and [N, K] with scales of blocks."""
    if torch.float8_e5m2 in (a.codes.dtype, b.codes.dtype) or a.codes.shape[1] % STRIP or a.codes.shape[0] % _PIECE:
        return False
    if b.block == a.block:
        return b.codes.shape[0] % _PIECE == 0
    return b.codes.shape[0] % STRIP == 0 and b.scale.shape[1] % _BLOCKS_TOGETHER == 0


def _own_blocks_mm(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """The same as one expert: codes [M, K] and [N, K]."""
    left = ScaledCodes(_whole_pieces(a.codes), _side_by_side(a.scale))
    if b.block != a.block:
        right = ScaledCodes(_whole_pieces(b.codes).unsqueeze(0), b.scale.contiguous().unsqueeze(0))
        end = torch.full((1,), len(left.codes), dtype=torch.int32, device=left.codes.device)
        return grouped_rows_product(left, right, end, out_dtype, has_strips=True, is_fast=False)
    right = ScaledCodes(_whole_pieces(b.codes), _side_by_side(b.scale))
    end = torch.full((1,), left.codes.shape[1], dtype=torch.int32, device=left.codes.device)
    out = torch.zeros(1, len(left.codes), len(right.codes), device=left.codes.device)
    grouped_wgrad_product(out, left, right, end, has_strips=True)
    return out[0].to(out_dtype)


def _side_by_side(scale: torch.Tensor) -> torch.Tensor:
    """Scales [M, K / 128] with neighbouring rows next to each other in memory."""
    return scale if scale.stride(0) == 1 else scale.t().contiguous().t()


def _whole_pieces(codes: torch.Tensor) -> torch.Tensor:
    """Pad the sum of codes [M, K] with zeros to the multiple that the kernels want."""
    missing = -codes.shape[1] % _PIECE
    if not missing:
        return codes
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype)
