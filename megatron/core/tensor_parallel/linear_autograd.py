"""The product of a column-parallel layer, with its communication beside the products of backward.

    forward   full = gather(x)  under sequence parallelism, else x            y = full A^T + b
    backward  comm     | gather x again |                | sum dx over the ranks (and keep own rows) |
              compute  | dx = dy A      |                | dA = dy^T full                            |

Under sequence parallelism only the shard [s / W, ...] is kept; the gathered input lives no longer than the products
that read it.

Legend: W ranks, s sequence, b batch, i input features, o output features of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.utils.collectives import all_gather, all_reduce, reduce_scatter
from megatron.core.utils.divide import divide


def column_parallel_linear(
    input_: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    is_sequence_parallel: bool,
) -> torch.Tensor:
    """Multiply by this rank's rows of the matrix.

    Shapes: input_ [s / W, b, i] under sequence parallelism, else [..., i]; weight [o, i], bias [o] -> [s, b, o].
    Memory: keeps `input_` and `weight` for backward.
    """
    return _ColumnParallelLinear.apply(input_, weight, bias, group, is_sequence_parallel)


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        is_sequence_parallel: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight)
        ctx.has_bias, ctx.group, ctx.is_sequence_parallel = bias is not None, group, is_sequence_parallel
        if is_sequence_parallel:
            gathered, _ = _start_gather(input_, group, async_op=False)
            return F.linear(gathered, weight, bias)
        return F.linear(input_, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        input_, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathering = None
        if ctx.is_sequence_parallel and needs_weight:
            input_, gathering = _start_gather(input_, ctx.group, async_op=True)
        grad_input = grad_weight = grad_bias = summing = None
        if needs_input:
            partial = grad.matmul(weight)
            grad_input, summing = _start_sum(partial, ctx.group, ctx.is_sequence_parallel)
        flat = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            if gathering is not None:
                gathering.wait()
            grad_weight = flat.t().matmul(input_.reshape(-1, input_.shape[-1]))
        if ctx.has_bias and needs_bias:
            grad_bias = flat.sum(dim=0)
        if summing is not None:
            summing.wait()
        return grad_input, grad_weight, grad_bias, None, None


def _start_gather(
    shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> tuple[torch.Tensor, dist.Work | None]:
    """All shards below each other: [n, ...] -> [W * n, ...], and a handle to wait for."""
    gathered = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
    return gathered, all_gather(gathered, shard.contiguous(), group, async_op=async_op)


def _start_sum(
    partial: torch.Tensor, group: dist.ProcessGroup, is_sequence_parallel: bool
) -> tuple[torch.Tensor, dist.Work | None]:
    """Sum [s, ...] over the ranks, under sequence parallelism only this rank's rows [s / W, ...]; and a handle."""
    if not is_sequence_parallel:
        return partial, all_reduce(partial, group, async_op=True)
    own = partial.new_empty(divide(partial.shape[0], group.size()), *partial.shape[1:])
    return own, reduce_scatter(own, partial.contiguous(), group, async_op=True)
