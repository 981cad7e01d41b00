"""The plain form of `operand`: torch's own operations, on every device. It defines the bits.

Legend: R rows (tokens), C columns (features), n experts, N outputs of a weight.
"""

from collections.abc import Sequence

import torch

from megatron.core.fp8.quantize import (
    AmaxHistory,
    Operand,
    Quantized,
    factor_of,
    quantize_blocks,
    quantize_rows,
    quantize_tensor,
    to_codes,
)
from megatron.core.fp8.recipes import Fp8RecipeSpec, Scaling


def plain_activation(
    values: torch.Tensor,
    recipe: Fp8RecipeSpec,
    dtype: torch.dtype,
    ends: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    by_row: bool = True,
    by_column: bool = True,
) -> Operand:
    """`quantize_activation`: values [R, C], ends int [n] or None, factor fp32 [] or None."""
    values = values if ends is None else without_tail(values, ends)
    if recipe.scaling is Scaling.TENSOR:
        return both_ways(quantize_tensor(values, dtype, factor), by_row, by_column)
    if recipe.scaling is Scaling.ROW:
        rows = quantize_rows(values, dtype) if by_row else None
        return Operand(rows, quantize_columns(values, dtype, ends) if by_column else None)
    block = recipe.activation_block
    assert block is not None, f"{recipe.name}: scales of blocks without the size of a block"
    rows = quantize_blocks(values, dtype, block) if by_row else None
    return Operand(rows, quantize_blocks(values.t().contiguous(), dtype, block) if by_column else None)


def plain_weight(
    weight: torch.Tensor, recipe: Fp8RecipeSpec, dtype: torch.dtype, factor: torch.Tensor | None = None
) -> Operand:
    """`quantize_weight`: [N, C] or [n, N, C], factor fp32 [] or None."""
    if weight.dim() == 3:
        parts = [plain_weight(one, recipe, dtype, factor) for one in weight.unbind(0)]
        return Operand(
            stack_quantized([part.by_row for part in parts]), stack_quantized([part.by_column for part in parts])
        )
    if recipe.scaling is Scaling.TENSOR:
        return both_ways(quantize_tensor(weight, dtype, factor))
    if recipe.scaling is Scaling.ROW:
        return Operand(quantize_rows(weight, dtype), quantize_columns(weight, dtype))
    assert recipe.weight_block is not None, f"{recipe.name}: scales of blocks without the size of a block"
    return both_ways(quantize_blocks(weight, dtype, recipe.weight_block))


def stack_quantized(parts: Sequence[Quantized]) -> Quantized:
    """N matrices [N, C] as one [n, N, C]; scales are stacked likewise, one per tensor as [n, 1, 1]."""
    codes = torch.stack([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
    scales = [part.scale if part.scale.dim() == 2 else part.scale.view(1, 1) for part in parts]
    return Quantized(codes, torch.stack(scales), parts[0].block)


def quantize_columns(values: torch.Tensor, dtype: torch.dtype, ends: torch.Tensor | None = None) -> Quantized:
    """One scale for each column, or each column within each expert.

    Shapes: values [R, C], ends int [n] -> codes [C, R], scale [C, 1] without experts, [n, C] with.
    """
    if ends is None:
        return quantize_rows(values.t().contiguous(), dtype)
    num_experts = ends.numel()
    owner = torch.searchsorted(ends, torch.arange(values.shape[0], device=values.device), right=True)  # [R], n in tail
    amax = values.new_zeros(num_experts + 1, values.shape[1])
    amax.scatter_reduce_(0, owner.unsqueeze(1).expand_as(values), values.abs(), "amax")
    factor = factor_of(amax[:num_experts], dtype)
    spread = torch.cat([factor, torch.ones_like(factor[:1])])[owner]
    codes = to_codes(values.to(torch.float32) * spread, dtype)
    return Quantized(codes.view(torch.uint8).t().contiguous().view(dtype), factor.reciprocal())


def both_ways(quantized: Quantized, by_row: bool = True, by_column: bool = True) -> Operand:
    """Use one set of codes in both orientations."""
    return Operand(quantized if by_row else None, transposed(quantized) if by_column else None)


def transposed(quantized: Quantized) -> Quantized:
    """Codes [R, C] -> [C, R], contiguous, with the scales turned alike."""
    codes = quantized.codes.view(torch.uint8).t().contiguous().view(quantized.codes.dtype)
    block = None if quantized.block is None else (quantized.block[1], quantized.block[0])
    return Quantized(codes, quantized.scale.t() if quantized.scale.dim() == 2 else quantized.scale, block)


def without_tail(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Values [R, C] with zeros behind the last expert's rows; ends int [n]."""
    rows = torch.arange(values.shape[0], device=values.device)
    return torch.where((rows < ends[-1]).unsqueeze(1), values, torch.zeros_like(values[:1]))


def factor_from_history(
    values: torch.Tensor, dtype: torch.dtype, history: AmaxHistory, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """Factor fp32 [] of delayed scaling for values [R, C] or [n, N, C], ends int [n] or None; notes their amax."""
    amax = plain_amax(values, ends)
    if history.noted is not None:
        history.noted.copy_(torch.maximum(history.noted, amax))
    return factor_of(torch.where(history.past > 0, history.past, amax), dtype, history.margin)


def plain_amax(values: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Largest magnitude fp32 [] of values [R, C] or [n, N, C], ends int [n] or None."""
    if not values.numel():
        return values.new_zeros((), dtype=torch.float32)
    return (values if ends is None else without_tail(values, ends)).abs().amax().float()
