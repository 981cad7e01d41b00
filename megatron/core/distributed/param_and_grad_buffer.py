"""One contiguous gradient buffer for parameters of one dtype and one kind (dense or expert).

Gradients are accumulated over microbatches and reduced over ranks in the wider of the parameter's dtype and fp32: bf16
and fp16 sums of many small terms would lose them, and fp64 stays fp64.
"""

import torch

from megatron.core.distributed.param_layout import BufferLayout


def main_grad_dtype(param_dtype: torch.dtype, reduce_in_fp32: bool) -> torch.dtype:
    """Dtype in which the gradients of a parameter are accumulated."""
    return torch.promote_types(param_dtype, torch.float32) if reduce_in_fp32 else param_dtype


def get_main_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """Return the view of the buffer that belongs to `param` [...], in its shape."""
    return param.main_grad  # type: ignore[attr-defined]


class ParamAndGradBuffer:
    """Owns the gradient memory; each parameter gets its view as `param.main_grad`, in the parameter's shape."""

    def __init__(self, params: dict[str, torch.nn.Parameter], dtype: torch.dtype, layout: BufferLayout) -> None:
        """Allocate zeros for `params`, given in registration order, on their device."""
        self.params = params
        self.layout = layout
        device = next(iter(params.values())).device
        self.grad_data = torch.zeros(layout.num_elements, dtype=dtype, device=device)
        for offset, param in zip(layout.offsets, params.values(), strict=True):
            view = self.grad_data[offset : offset + param.numel()].view(param.shape)
            param.main_grad = view  # type: ignore[attr-defined]

    def zero(self) -> None:
        """Clear all gradients, padding included."""
        self.grad_data.zero_()

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by a number or a one-element tensor [1] or []."""
        self.grad_data.mul_(factor)
