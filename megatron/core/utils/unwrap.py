"""The model below the wrappers that hold it in an attribute `module`."""

from typing import Any

import torch


def unwrap_model(model: torch.nn.Module) -> Any:
    """Return the innermost module: the one that has no `module` below it."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model
