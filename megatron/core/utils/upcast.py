"""Widening to at least fp32: `.float()` would narrow an fp64 tensor, which the fp64 reference runs must not see."""

import torch


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [any] in fp32, or unchanged if it is fp32 or fp64."""
    return x.to(wide_dtype(x.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are accumulated: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)
