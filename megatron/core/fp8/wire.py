"""Rows of hidden states as 8-bit codes with their scales, in one row that any exchange can copy.

    [ h / 128 scales in fp32 | h codes | up to 7 bytes of zeros ]      about h + h / 32 bytes in place of 2 h

Codes are e4m3, scales powers of two for 1 x 128 elements, as for blocks. A packed row of zeros, such as padding,
is a row of zeros. Each value arrives within 2^-4 of itself, or 2^-9 * amax / 448 of its block if that is larger.
Quantising what arrived once more by 1 x 128 changes nothing: scales are powers of two, so the same values come out.

Legend: T rows, h width, w width of a packed row in elements of the original dtype.
"""

import torch

from megatron.core.fp8.operand import quantize_activation
from megatron.core.fp8.quantize import Quantized
from megatron.core.fp8.recipes import FORWARD_DTYPE, WIRE

_SCALE_BYTES, _ALIGNMENT = 4, 8


def pack_rows(rows: torch.Tensor) -> torch.Tensor:
    """Quantise rows [T, h] -> [T, w] of the same dtype, to be copied and nothing else. Host: no synchronisation."""
    quantized = quantize_activation(rows, WIRE, FORWARD_DTYPE, by_column=False).by_row
    scales = quantized.scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # kernels turn them
    codes = quantized.codes.view(torch.uint8)
    filling = codes.new_zeros(len(rows), -(scales.shape[1] + codes.shape[1]) % _ALIGNMENT)
    return torch.cat([scales, codes, filling], dim=1).view(rows.dtype)


def unpack_rows(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Packed rows [T, w] -> rows [T, h] of width h, in the dtype of the packed ones."""
    assert WIRE.activation_block is not None, "rows on the wire have scales of blocks"
    num_scales = -(-width // WIRE.activation_block[1])
    data = packed.contiguous().view(torch.uint8)
    scales = data[:, : num_scales * _SCALE_BYTES].contiguous().view(torch.float32)
    codes = data[:, num_scales * _SCALE_BYTES :][:, :width].view(FORWARD_DTYPE)
    return Quantized(codes, scales, WIRE.activation_block).dequantize(packed.dtype)
