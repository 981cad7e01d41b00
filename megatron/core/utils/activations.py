"""Activations that torch does not offer as one function."""

import torch
import torch.nn.functional as F


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of ReLU, element by element. Shapes: [...] -> [...]."""
    return torch.square(F.relu(x))
