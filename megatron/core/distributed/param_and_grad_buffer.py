"""One contiguous gradient buffer for parameters of one dtype and one kind (dense or expert), and with the distributed
optimizer one of the same layout for the parameters themselves.

Gradients are accumulated over microbatches and reduced over ranks in the wider of the parameter's dtype and fp32: bf16
and fp16 sums of many small terms would lose them, and fp64 stays fp64.
"""

from collections.abc import Iterable

import torch

from megatron.core.distributed.param_layout import BufferLayout


def main_grad_dtype(param_dtype: torch.dtype, reduce_in_fp32: bool) -> torch.dtype:
    """Dtype in which the gradients of a parameter are accumulated."""
    return torch.promote_types(param_dtype, torch.float32) if reduce_in_fp32 else param_dtype


def get_main_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """Return the view of the buffer that belongs to `param` [...], in its shape."""
    return param.main_grad  # type: ignore[attr-defined]


def packed_units(params: Iterable[torch.nn.Parameter]) -> list[int]:
    """For each parameter the address of its storage: those that a layer has packed into one storage share a number."""
    return [param.untyped_storage().data_ptr() for param in params]


class ParamAndGradBuffer:
    """Owns the gradient memory; each parameter gets its view as `param.main_grad`, in the parameter's shape."""

    def __init__(
        self,
        params: dict[str, torch.nn.Parameter],
        dtype: torch.dtype,
        layout: BufferLayout,
        holds_params: bool = False,
    ) -> None:
        """Allocate zeros for `params`, given in registration order, on their device.

        With `holds_params` the parameters move into a buffer of their own dtype, values kept: `param.data` becomes a
        view of `param_data`.
        """
        self.params = params
        self.layout = layout
        first = next(iter(params.values()))
        self.grad_data = torch.zeros(layout.num_elements, dtype=dtype, device=first.device)
        self.param_data = torch.zeros_like(self.grad_data, dtype=first.dtype) if holds_params else None
        for offset, param in zip(layout.offsets, params.values(), strict=True):
            place = slice(offset, offset + param.numel())
            param.main_grad = self.grad_data[place].view(param.shape)  # type: ignore[attr-defined]
            if self.param_data is not None:
                view = self.param_data[place].view(param.shape)
                view.copy_(param.detach())
                param.data = view

    def zero(self) -> None:
        """Clear all gradients, padding included."""
        self.grad_data.zero_()
