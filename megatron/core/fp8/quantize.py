"""From floats to 8-bit codes and back: the reference that defines the bits, on every device.

A value x is stored as a code of 4 or 5 exponent bits and a scale that it shares with its neighbours:

    factor = max / amax                 max: largest code (448 for e4m3, 57344 for e5m2), amax: largest |x| of the group
    code   = round(clamp(x * factor))   to nearest, ties to even
    x      ~ code * scale               scale = 1 / factor

A group is a whole tensor, a row, or a block. A group of zeros, and one so small that its factor would leave fp32, gets
the largest factor allowed. With power-of-two scales the factor is rounded down to a power of two, so that scaling adds
no rounding of its own.

Codes saturate: a finite value beyond the range becomes the largest code. An infinity or NaN becomes NaN in every format
and poisons its group's scale, so that a later check of loss and gradients sees it; saturation would hide it.

Rounding error of a finite value, relative to the group's amax: at most 2^-4 of the value or 2^-10 * amax / 448 (e4m3);
2^-3 of the value or 2^-17 * amax / 57344 (e5m2); whichever is larger. With power-of-two scales the second term doubles.

Legend: R rows, C columns.
"""

import dataclasses
import math

import torch

MAX_FACTOR = 2.0**126
"""Its reciprocal is the smallest normal fp32 number."""


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Codes and the scales that turn them back into values."""

    codes: torch.Tensor
    """fp8 [R, C], or [n, R, C] for n matrices."""

    scale: torch.Tensor
    """fp32, one for each group: [] tensor, [R, 1] rows, [R / a, C / b] blocks of a x b (rounded up)."""

    block: tuple[int, int] | None = None
    """Size of a block; None if the scale is broadcast as it is."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values [R, C] that the codes stand for."""
        return (self.codes.to(torch.float32) * _expand(self.scale, self.codes.shape, self.block)).to(dtype)


@dataclasses.dataclass(frozen=True)
class Operand:
    """One matrix [R, C], quantised for the products that it enters."""

    rows: Quantized | None
    columns: Quantized | None

    @property
    def by_row(self) -> Quantized:
        """Codes [R, C], scales constant along C up to blocks: for products that sum over C."""
        assert self.rows is not None, "the matrix was quantised by column only"
        return self.rows

    @property
    def by_column(self) -> Quantized:
        """Codes [C, R] of the transpose, scales constant along R up to blocks: for products that sum over R."""
        assert self.columns is not None, "the matrix was quantised by row only"
        return self.columns


@dataclasses.dataclass(frozen=True)
class AmaxHistory:
    """What delayed scaling knows of one operand."""

    past: torch.Tensor
    """fp32 [], the amax that the factor comes from; 0 if none is known: then it is that of the values."""

    noted: torch.Tensor | None
    """fp32 [], largest amax of this step: a quantisation raises it to the amax of its values. None: it does not."""

    margin: int = 0
    """2^margin of the range is left unused."""


def max_code(dtype: torch.dtype) -> float:
    """Largest finite value of an fp8 dtype."""
    return torch.finfo(dtype).max


def factor_of(amax: torch.Tensor, dtype: torch.dtype, margin: int = 0, power_of_two: bool = False) -> torch.Tensor:
    """Factor of each group, fp32 [...] from its amax [...]; NaN where the amax is not finite.

    `margin` leaves 2^margin of the range unused.
    """
    amax = amax.to(torch.float32)
    factor = (torch.full_like(amax, max_code(dtype)) / amax).clamp(
        max=MAX_FACTOR
    )  # rounded once, as a number / amax is not
    factor = torch.where(amax > 0, factor, torch.full_like(factor, 1.0))
    factor = torch.where(torch.isfinite(amax), factor, torch.full_like(factor, math.nan))
    if margin:
        factor = factor * 2.0**-margin
    return _floor_power_of_two(factor) if power_of_two else factor


def _floor_power_of_two(factor: torch.Tensor) -> torch.Tensor:
    """Clear the mantissa of fp32 [...]; NaN stays NaN."""
    bits = factor.view(torch.int32) & 0x7F800000
    return torch.where(torch.isnan(factor), factor, bits.view(torch.float32))


def to_codes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 values [...], scaled already, to fp8 [...]: saturating, NaN for what is not finite."""
    limit = max_code(dtype)
    codes = values.clamp(-limit, limit).to(dtype)
    # one pattern of bits for every NaN, whatever the sign and payload that a device gives it
    nan = torch.full((), 0x7F, dtype=torch.uint8, device=values.device)
    return torch.where(torch.isfinite(values), codes.view(torch.uint8), nan).view(dtype)


def quantize_tensor(
    values: torch.Tensor, dtype: torch.dtype, factor: torch.Tensor | None = None, margin: int = 0
) -> Quantized:
    """One scale for values [R, C]; `factor` fp32 [] comes from elsewhere (delayed scaling), by default from amax."""
    if factor is None:
        factor = factor_of(_amax(values), dtype, margin)
    return Quantized(to_codes(values.to(torch.float32) * factor, dtype), factor.reciprocal())


def quantize_rows(values: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """One scale for each row of values [R, C]: scale fp32 [R, 1]."""
    amax = values.abs().amax(1, keepdim=True) if values.shape[1] else values.new_zeros(values.shape[0], 1)
    factor = factor_of(amax, dtype)
    return Quantized(to_codes(values.to(torch.float32) * factor, dtype), factor.reciprocal())


def quantize_blocks(values: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Quantized:
    """One power-of-two scale for each block of values [R, C]; blocks at the edge may be smaller."""
    rows, columns = values.shape
    height, width = block
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % width, 0, -rows % height))
    grid = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))  # [R / a, a, C / b, b]
    factor = factor_of(grid.amax((1, 3)), dtype, power_of_two=True)
    scaled = values.to(torch.float32) * _expand(factor, values.shape, block)
    return Quantized(to_codes(scaled, dtype), factor.reciprocal(), block)


def _amax(values: torch.Tensor) -> torch.Tensor:
    """Largest magnitude [] of values [...], 0 if there are none."""
    return values.abs().amax() if values.numel() else values.new_zeros(())


def _expand(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int] | None) -> torch.Tensor:
    """Scale of each element, [..., R, C] or broadcastable to it."""
    if block is None:
        return scale
    tall = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return tall.repeat_interleave(block[1], -1)[..., : shape[-1]]
