"""How activations change hands between tensor-parallel regions, with the gradient of each step.

A region is where every rank works on its own part of the weights. Entering and leaving are pairs of communications,
one for each direction of the pass:

| function                                  | forward                   | backward                  |
|-------------------------------------------|---------------------------|---------------------------|
| copy_to_tensor_model_parallel_region      | -                         | sum                       |
| reduce_from_tensor_model_parallel_region  | sum                       | -                         |
| scatter_to_tensor_model_parallel_region   | keep own last dimension   | gather last dimension     |
| gather_from_tensor_model_parallel_region  | gather last dimension     | keep own last dimension   |
| scatter_to_sequence_parallel_region       | keep own sequence shard   | gather sequence           |
| gather_from_sequence_parallel_region      | gather sequence           | sum and keep own shard    |
| reduce_scatter_to_sequence_parallel_region| sum and keep own shard    | gather sequence           |

The sequence is the first dimension. A group of one rank, or None, communicates nothing.

Legend: W ranks of the group, s sequence, h width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.utils.collectives import all_gather, all_reduce, reduce_scatter
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_size

_Step = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def copy_to_tensor_model_parallel_region(input_: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Hand [...] to every rank's part of the region; its gradient is the sum of the parts' gradients."""
    return _mapped(input_, _keep, _sum, group)


def reduce_from_tensor_model_parallel_region(
    input_: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum the ranks' parts [...] -> [...], the same on all ranks."""
    return _mapped(input_, _sum, _keep, group)


def scatter_to_tensor_model_parallel_region(
    input_: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Keep this rank's slice of the last dimension: [..., W * n] -> [..., n]."""
    return _mapped(input_, _own_columns, _gather_columns, group)


def gather_from_tensor_model_parallel_region(
    input_: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Join the ranks' slices of the last dimension: [..., n] -> [..., W * n]."""
    return _mapped(input_, _gather_columns, _own_columns, group)


def scatter_to_sequence_parallel_region(input_: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Keep this rank's shard of a sequence that all ranks hold: [s, ...] -> [s / W, ...]."""
    return _mapped(input_, own_rows, _gather_rows, group)


def gather_from_sequence_parallel_region(input_: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Join the ranks' shards for a region that works on parts of the weights: [s / W, ...] -> [s, ...]."""
    return _mapped(input_, _gather_rows, _sum_own_rows, group)


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum the ranks' parts and keep this rank's shard of the sequence: [s, ...] -> [s / W, ...]."""
    return _mapped(input_, _sum_own_rows, _gather_rows, group)


def own_rows(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Shard of this rank along the first dimension, without gradient of its own: [s, ...] -> [s / W, ...], a copy."""
    size = group_size(group)
    if group is None or size == 1:
        return tensor
    rows = divide(tensor.shape[0], size)
    return tensor.narrow(0, group.rank() * rows, rows).contiguous()


def _mapped(tensor: torch.Tensor, forward: _Step, backward: _Step, group: dist.ProcessGroup | None) -> torch.Tensor:
    return tensor if group_size(group) == 1 else _Mapping.apply(tensor, forward, backward, group)


class _Mapping(torch.autograd.Function):
    """One step forward, another one backward; keeps no tensor."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, forward: _Step, backward: _Step, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.backward_step, ctx.group = backward, group
        return forward(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.backward_step(grad_outputs[0], ctx.group), None, None, None


def _keep(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    del group
    return tensor.view_as(tensor)


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group)
    return total


def _own_columns(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    columns = divide(tensor.shape[-1], group.size())
    return tensor.narrow(-1, group.rank() * columns, columns).contiguous()


def _gather_columns(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    all_gather(gathered.flatten(0, 1), tensor.contiguous(), group)
    return torch.cat(gathered.unbind(), dim=-1)


def _gather_rows(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    all_gather(gathered, tensor.contiguous(), group)
    return gathered


def _sum_own_rows(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    own = tensor.new_empty(divide(tensor.shape[0], group.size()), *tensor.shape[1:])
    reduce_scatter(own, tensor.contiguous(), group)
    return own
