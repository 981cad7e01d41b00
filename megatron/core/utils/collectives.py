"""Collectives over a group that may be absent, under one name each.

None is a group of one rank and communicates nothing. torch renames collectives between releases (the reduce-scatter and
all-gather of one tensor were called `reduce_scatter_tensor` and `all_gather_into_tensor` before they became
`..._single`); the choice is made here, once.
"""

import torch
import torch.distributed as dist

from megatron.core.utils.groups import group_size

SUM = dist.ReduceOp.SUM
AVG = dist.ReduceOp.AVG
MAX = dist.ReduceOp.MAX

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = SUM, async_op: bool = False
) -> dist.Work | None:
    """Reduce [...] in place over `group`; with `async_op` the returned handle must be waited for."""
    if group_size(group) == 1:
        return None
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None, group_src: int = 0) -> None:
    """Overwrite [...] in place by the tensor of the rank `group_src` of `group`."""
    if group_size(group) > 1:
        dist.broadcast(tensor, group=group, group_src=group_src)


def reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = SUM
) -> None:
    """Reduce `tensor` [n * size, ...] over `group` and keep slice `rank` of it in `output` [n, ...]."""
    if group_size(group) == 1:
        output.copy_(tensor)
        return
    _reduce_scatter(output, tensor, op=op, group=group)


def all_gather(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Put the ranks' `tensor` [n, ...] below each other, in rank order, into `output` [n * size, ...]."""
    if group_size(group) == 1:
        output.copy_(tensor)
        return
    _all_gather(output, tensor, group=group)
