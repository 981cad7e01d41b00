"""Modules whose buffers keep their dtype when a model is converted to half precision."""

from collections.abc import Callable
from typing import Any

import torch


class ExactBuffersModule(torch.nn.Module):
    """A module whose buffers are counters and biases that must not be rounded.

    `model.bfloat16()`, `.half()` and `.to(dtype)` go through `_apply` of every module; here they move buffers to
    another device and leave dtype and bits alone.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "ExactBuffersModule":
        exact: dict[str, Any] = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in exact.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self
