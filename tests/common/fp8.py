"""Operands for FP8 tests on a CPU and on a GPU, and comparison of their bits."""

from __future__ import annotations

import torch

from megatron.core.fp8.quantize import Operand

COUNTS = ((128, 0, 128), None, (0, 0, 0))
"""Rows per expert; None for a dense layer."""

UNEVEN = (48, 0, 16, 0, 96, 64)
"""Rows per expert where tiles of kernels hold several; not for blocks."""

SPARE = 32
"""Rows behind the last expert's, which hold NaN."""


def spread(*shape: int, seed: int) -> torch.Tensor:
    """Normal numbers [...] over 40 binary orders of magnitude, some rows zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator) * 2.0 ** torch.randint(-20, 20, shape, generator=generator)
    values[..., 5, :] = 0
    return values


def activation(counts, dtype: torch.dtype, columns: int = 144, bad: float | None = None) -> torch.Tensor:
    """Rows [R, columns] of experts; `bad` stands in one place."""
    num_rows = 100 if counts is None else sum(counts)
    values = spread(num_rows + SPARE, columns, seed=num_rows)
    if counts is not None:
        values[num_rows:] = torch.nan
    if bad is not None and num_rows:
        values[17, 3] = bad
    return values.to(dtype)


def ends_of(counts, device: str = "cpu") -> torch.Tensor | None:
    """Row ends int32 [n]."""
    return None if counts is None else torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def weights(*shape: int) -> torch.Tensor:
    """Weights [..., N, C] in bf16, those of different experts on different scales."""
    values = spread(*shape, seed=sum(shape))
    if values.dim() == 3:
        values *= 2.0 ** torch.arange(len(values)).view(-1, 1, 1)
    return values.bfloat16()


def parts_of(operand: Operand) -> dict[str, torch.Tensor]:
    """Codes, as bytes, and scales of both orientations, on the CPU."""
    found = {}
    for name, part in (("rows", operand.by_row), ("columns", operand.by_column)):
        found[f"{name} codes"] = part.codes.view(torch.uint8).cpu()
        found[f"{name} scale"] = part.scale.cpu()
    return found


def same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """Say where two operands differ; a NaN equals a NaN."""
    differing = []
    for name, wanted in want.items():
        if got[name].shape != wanted.shape:
            differing.append(f"{name}: shape {list(got[name].shape)} is not {list(wanted.shape)}")
            continue
        unequal = (got[name] != wanted) & ~((got[name] != got[name]) & (wanted != wanted))
        if unequal.any():
            place = unequal.nonzero()[0].tolist()
            pair = got[name][tuple(place)].item(), wanted[tuple(place)].item()
            differing.append(f"{name}: {int(unequal.sum())} of {unequal.numel()}, first at {place}: {pair}")
    return differing
