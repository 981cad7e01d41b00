"""Products of quantised matrices: torch's FP8 kernels on a GPU, the same meaning in fp32 on a CPU.

    matmul            A [M, K], B [N, K]                  -> A B^T [M, N]
    grouped_matmul    rows [R, K], weights [n, N, K]      -> each expert's rows times its weight transposed [R, N]
    grouped_wgrad     dY^T [N, R], X^T [K, R]             -> for each expert the product over its rows [n, N, K]

Fast accumulation leaves partial sums in the tensor core, with fewer bits than fp32; precise accumulation moves them
into fp32 registers every few products. Forward is fast and backward precise. On a CPU both are fp32.

Rows of the result behind the last expert's are undefined. An expert without rows has a weight gradient of zeros.

Legend: M, N, K sizes of a product, R rows sorted by expert, n experts.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from megatron.core.fp8.quantize import Quantized


def matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype, is_fast: bool = False) -> torch.Tensor:
    """Multiply codes [M, K] by codes [N, K] transposed -> [M, N] in `out_dtype`."""
    if not a.codes.is_cuda:
        return (a.dequantize() @ b.dequantize().t()).to(out_dtype)
    return _scaled_mm(a, b, out_dtype, is_fast)


def grouped_matmul(
    rows: Quantized, weights: Quantized, ends: torch.Tensor, out_dtype: torch.dtype, is_fast: bool = False
) -> torch.Tensor:
    """Multiply each expert's rows by its weight: codes [R, K] and [n, N, K], ends int [n] -> [R, N] in `out_dtype`."""
    wide, wide_weights = rows.dequantize(), weights.dequantize()
    out = wide.new_zeros(wide.shape[0], wide_weights.shape[1])
    for expert, begin, end in _groups(ends):
        out[begin:end] = wide[begin:end] @ wide_weights[expert].t()
    return out.to(out_dtype)


def grouped_wgrad(grad: Quantized, rows: Quantized, ends: torch.Tensor) -> torch.Tensor:
    """Weight gradient of each expert: codes [N, R] and [K, R], ends int [n] -> fp32 [n, N, K]."""
    out = torch.zeros(ends.numel(), grad.codes.shape[0], rows.codes.shape[0], device=grad.codes.device)
    for expert, begin, end in _groups(ends):
        out[expert] = _columns(grad, expert, begin, end) @ _columns(rows, expert, begin, end).t()
    return out


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
    """Multiply codes [M, K] and [N, K] with the kernel that their scales ask for."""
    scale_b = b.scale.t() if b.scale.dim() == 2 else b.scale
    left, right = _whole_pieces(a.codes), _whole_pieces(b.codes)
    return torch._scaled_mm(left, right.t(), a.scale, scale_b, out_dtype=out_dtype, use_fast_accum=is_fast)


def _whole_pieces(codes: torch.Tensor) -> torch.Tensor:
    """Pad the sum of codes [M, K] with zeros to the multiple of 16 that the kernels want."""
    missing = -codes.shape[1] % 16
    if not missing:
        return codes
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype)
