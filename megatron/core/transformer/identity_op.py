"""Parts of a layer spec that do nothing."""

from typing import Any

import torch


class IdentityOp(torch.nn.Module):
    """Accepts any construction arguments and returns its first input [any]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        super().__init__()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `x` [any] unchanged."""
        del args, kwargs
        return x
