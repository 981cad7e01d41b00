"""The weights that the optimizer updates: fp32 copies of half-precision parameters, else the parameters themselves.

A bf16 weight cannot take up an update below 1/256 of itself; the fp32 copy can, and the parameter is its rounding.
"""

from collections.abc import Iterable, Iterator

import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)


class MainParams:
    """Pairs of (model parameter, main parameter), in the order given; both are the same object for fp32 and fp64."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Copy what is half precision."""
        self.pairs = [(param, _main_copy(param) if param.dtype in HALF_DTYPES else param) for param in params]
        self._halves = [(param.detach(), main.detach()) for param, main in self.pairs if main is not param]

    def collect_grads(self) -> list[torch.Tensor]:
        """Point the main parameters' `grad` at the accumulated gradients and return those that exist.

        `main_grad` comes first, `grad` serves models without gradient buffers. A gradient is copied only if its dtype
        is not the main parameter's, so clipping works on the buffer itself.
        """
        grads = []
        for param, main in self.pairs:
            grad = getattr(param, "main_grad", None)
            grad = param.grad if grad is None else grad
            main.grad = None if grad is None else grad.to(main.dtype)
            if main.grad is not None:
                grads.append(main.grad)
        return grads

    def grads_by_param(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """The gradients that `collect_grads` found, with the model parameters that they belong to."""
        return ((param, main.grad) for param, main in self.pairs if main.grad is not None)

    def release_grads(self) -> None:
        """Undo `collect_grads`: backward must find no gradient that is a view of a buffer, or it adds to it twice."""
        for param, main in self.pairs:
            if main is not param or hasattr(param, "main_grad"):
                main.grad = None

    def write_back(self, is_rounded: bool = False) -> None:
        """Round the main parameters into the model's; with `is_rounded` the update has done that."""
        if self._halves and not is_rounded:
            torch._foreach_copy_([half for half, _ in self._halves], [main for _, main in self._halves])

    def reload(self) -> None:
        """Take the main parameters anew from the model's, after weights were loaded without optimizer state."""
        if self._halves:
            torch._foreach_copy_([main for _, main in self._halves], [half for half, _ in self._halves])


def _main_copy(param: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(param.detach().clone().float())
