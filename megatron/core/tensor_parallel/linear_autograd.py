"""The products of linear layers, with their communication beside the products of backward.

    column   forward   full = gather(x)  under sequence parallelism, else x      y = full A^T + b
             backward  comm     | gather x again |             | sum dx over the ranks (and keep own rows) |
                       compute  | dx = dy A      |             | dA = dy^T full                            |

    row      forward   y = sum of x A^T over the ranks (and keep own rows)
             backward  comm     | gather dy                 |
                       compute  | own rows of dx = dy A     | the other rows | dA = dy^T x |

Without a group the product communicates nothing. Under sequence parallelism a column layer keeps only its shard
[s / W, ...]; the gathered input lives no longer than the products that read it. The weight gradient goes where its sink
puts it (`deferred_wgrad`); communication and bias gradients are always part of backward.

Legend: W ranks, s sequence, b batch, i input features, o output features of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.deferred_wgrad import WgradSink
from megatron.core.fusions.fused_wgrad import DenseWgrad
from megatron.core.utils.collectives import all_gather, all_reduce, reduce_scatter
from megatron.core.utils.divide import divide


def column_parallel_linear(
    input_: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    is_sequence_parallel: bool = False,
    fuses_wgrad: bool = True,
) -> torch.Tensor:
    """Multiply by this rank's rows of the matrix.

    Shapes: input_ [s / W, b, i] under sequence parallelism, else [..., i]; weight [o, i], bias [o] -> [s, b, o].
    Memory: keeps `input_` and `weight` for backward.
    """
    sink = WgradSink([weight], fuses_wgrad)
    return _ColumnParallelLinear.apply(input_, weight, bias, group, is_sequence_parallel, sink)


def row_parallel_linear(
    input_: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None,
    is_sequence_parallel: bool = False,
    fuses_wgrad: bool = True,
) -> torch.Tensor:
    """Multiply by this rank's columns of the matrix and add up over the ranks.

    Shapes: input_ [..., i], under sequence parallelism [s, b, i]; weight [o, i] -> [..., o] or [s / W, b, o].
    Memory: keeps `input_` and `weight` for backward.
    """
    return _RowParallelLinear.apply(input_, weight, group, is_sequence_parallel, WgradSink([weight], fuses_wgrad))


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        is_sequence_parallel: bool,
        sink: WgradSink,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight)
        ctx.has_bias, ctx.group, ctx.is_sequence_parallel, ctx.sink = (
            bias is not None,
            group,
            is_sequence_parallel,
            sink,
        )
        if group is not None and is_sequence_parallel:
            gathered, _ = _start_gather(input_, group, async_op=False)
            return F.linear(gathered, weight, bias)
        return F.linear(input_, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        input_, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathering = None
        if ctx.group is not None and ctx.is_sequence_parallel and needs_weight:
            input_, gathering = _start_gather(input_, ctx.group, async_op=True)
        grad_input = grad_weight = grad_bias = summing = None
        if needs_input:
            grad_input = grad.matmul(weight)
            if ctx.group is not None:
                grad_input, summing = _start_sum(grad_input, ctx.group, ctx.is_sequence_parallel)
        flat = grad.reshape(-1, grad.shape[-1])
        if gathering is not None:
            gathering.wait()
        if needs_weight:
            (grad_weight,) = ctx.sink.take(DenseWgrad(flat, input_.reshape(-1, input_.shape[-1])))
        if ctx.has_bias and needs_bias:
            grad_bias = flat.sum(dim=0)
        if summing is not None:
            summing.wait()
        return grad_input, grad_weight, grad_bias, None, None, None


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup | None,
        is_sequence_parallel: bool,
        sink: WgradSink,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight)
        ctx.group, ctx.is_sequence_parallel, ctx.sink = group, is_sequence_parallel, sink
        output = F.linear(input_, weight)
        if group is None:
            return output
        output, summing = _start_sum(output, group, is_sequence_parallel)
        if summing is not None:
            summing.wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        input_, weight = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        grad_input = grad_weight = None
        if ctx.group is not None and ctx.is_sequence_parallel:
            grad, grad_input = _gather_beside_product(grad, weight if needs_input else None, ctx.group)
        elif needs_input:
            grad_input = grad.matmul(weight)
        if needs_weight:
            product = DenseWgrad(grad.reshape(-1, grad.shape[-1]), input_.reshape(-1, input_.shape[-1]))
            (grad_weight,) = ctx.sink.take(product)
        return grad_input, grad_weight, None, None, None


def _gather_beside_product(
    grad: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gather dy [s / W, b, o] and multiply it by the matrix [o, i]: dy [s, b, o], dx [s, b, i] (None without matrix).

    The rows that are here are multiplied while the others are on their way.
    """
    gathered, gathering = _start_gather(grad, group, async_op=True)
    product = None if weight is None else gathered.new_empty(*gathered.shape[:-1], weight.shape[1])
    num_rows, rank = grad.shape[0], group.rank()
    own = slice(rank * num_rows, (rank + 1) * num_rows)
    if product is not None and weight is not None:
        torch.matmul(grad, weight, out=product[own])
    if gathering is not None:
        gathering.wait()
    if product is not None and weight is not None:
        for others in (slice(0, own.start), slice(own.stop, None)):
            if product[others].shape[0]:
                torch.matmul(gathered[others], weight, out=product[others])
    return gathered, product


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
