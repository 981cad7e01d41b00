"""Tensors of one shape as one tensor: n parameters, or n main gradients, as the operand of a grouped kernel.

Each expert has parameters of its own, with their own names, gradients and checkpoint entries. If they lie at equal
distances in one storage, the [n, ...] operand is a view of them and nothing is copied.
"""

from collections.abc import Sequence

import torch


def pack(params: Sequence[torch.nn.Parameter]) -> None:
    """Move parameters of one shape [out, in] next to each other in one new storage, keeping their values."""
    storage = torch.stack([param.detach() for param in params])
    for param, part in zip(params, storage.unbind(0), strict=True):
        param.data = part


def stacked_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """N tensors [out, in] as a view [n, out, in] if they lie at equal distances in one storage, else None."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    address = first.data_ptr()
    step = tensors[1].data_ptr() - address
    is_uniform = step >= first.nbytes and all(
        tensor.data_ptr() == address + i * step and tensor.is_contiguous() for i, tensor in enumerate(tensors)
    )
    storage = first.untyped_storage().data_ptr()
    if not is_uniform or any(tensor.untyped_storage().data_ptr() != storage for tensor in tensors):
        return None
    distance = step // first.element_size()
    return first.as_strided((len(tensors), *first.shape), (distance, *first.stride()))


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """N tensors [out, in] as one [n, out, in]: a view if they lie at equal distances in one storage, else a copy."""
    view = stacked_view(tensors)
    return torch.stack(list(tensors)) if view is None else view
