"""Quantising a stretch of a weight as the whole weight is quantised: for a rank that holds only the stretch.

    every rank   amaxes of its stretch, zero elsewhere  ->  maximum over the ranks  ->  factors of the whole weight
    every rank   codes of its stretch by those factors

The codes are bit for bit those of `plain_weight`. Only recipes whose weights have one set of codes for both
orientations: scales of tensors and of square blocks.

Legend: N rows and C columns of the whole weight, H x W its blocks (N x C where one scale serves it), n elements of the
stretch, which begins at element `begin` of the flattened weight.
"""

import dataclasses

import torch

from megatron.core.fp8.plain_operand import both_ways, stack_quantized
from megatron.core.fp8.quantize import AmaxHistory, Operand, Quantized, factor_of, to_codes
from megatron.core.fp8.recipes import FORWARD_DTYPE, Fp8RecipeSpec


@dataclasses.dataclass(frozen=True)
class WeightGrid:
    """The groups of one weight [N, C] that share a scale."""

    num_rows: int
    num_columns: int
    block: tuple[int, int] | None
    """None: one scale for the whole weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of groups: [N / H, C / W], rounded up."""
        height, width = self.block or (self.num_rows, self.num_columns)
        return -(-self.num_rows // height), -(-self.num_columns // width)

    def note_amaxes(self, grid: torch.Tensor, values: torch.Tensor, begin: int) -> None:
        """Write into zeros fp32 [N / H, C / W] the largest magnitudes of a stretch [n]."""
        if self.block is None:
            grid.copy_(values.abs().amax())
            return
        (height, width), (first, last) = self.block, self._block_rows(begin, values.numel())
        start = first * height * self.num_columns
        padded = values.new_zeros((last - first) * height * self.num_columns)
        padded[begin - start : begin - start + values.numel()] = values.abs()
        tall = padded.view(-1, self.num_columns)
        wide = torch.nn.functional.pad(tall, (0, -self.num_columns % width))
        grid[first:last] = wide.unflatten(0, (-1, height)).unflatten(2, (-1, width)).amax((1, 3))

    def codes(self, values: torch.Tensor, begin: int, factors: torch.Tensor) -> torch.Tensor:
        """Codes fp8 [n] of a stretch [n] by the factors fp32 [N / H, C / W] of the whole weight."""
        if self.block is None:
            return to_codes(values.to(torch.float32) * factors.view(()), FORWARD_DTYPE)
        (height, width), (first, last) = self.block, self._block_rows(begin, values.numel())
        start = begin - first * height * self.num_columns
        spread = factors[first:last].repeat_interleave(height, 0).repeat_interleave(width, 1)[:, : self.num_columns]
        return to_codes(values.to(torch.float32) * spread.flatten()[start : start + values.numel()], FORWARD_DTYPE)

    def _block_rows(self, begin: int, numel: int) -> tuple[int, int]:
        """The first row of blocks that a stretch touches, and the one behind the last."""
        assert self.block is not None, "one scale for the whole weight: no rows of blocks"
        size = self.block[0] * self.num_columns
        return begin // size, -(-(begin + numel) // size)


def weight_factors(
    amaxes: list[torch.Tensor], recipe: Fp8RecipeSpec, history: AmaxHistory | None
) -> list[torch.Tensor]:
    """Factors fp32 [N / H, C / W] of the weights of one layer from their amaxes; a history serves all of them."""
    if history is None:
        is_block = recipe.weight_block is not None
        return [factor_of(grid, FORWARD_DTYPE, power_of_two=is_block) for grid in amaxes]
    amax = torch.stack([grid.amax() for grid in amaxes]).amax()
    if history.noted is not None:
        history.noted.copy_(torch.maximum(history.noted, amax))
    factor = factor_of(torch.where(history.past > 0, history.past, amax), FORWARD_DTYPE, history.margin)
    return [factor.expand_as(grid) for grid in amaxes]


def operand_of_codes(
    codes: list[torch.Tensor], factors: list[torch.Tensor], recipe: Fp8RecipeSpec, is_grouped: bool
) -> Operand:
    """What `quantize_weight` makes of whole weights, from their codes fp8 [N, C] and factors [N / H, C / W]."""
    block = recipe.weight_block
    parts = []
    for code, factor in zip(codes, factors, strict=True):
        scale = factor.reciprocal()
        parts.append(both_ways(Quantized(code, scale if block else scale.reshape(()), block)))
    if not is_grouped:
        return parts[0]
    return Operand(
        stack_quantized([part.by_row for part in parts]), stack_quantized([part.by_column for part in parts])
    )
