"""The collectives of dispatch and combine, with their gradients. A group of one rank communicates nothing.

Legend: W ranks of the group, h width.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron.core.utils.collectives import all_gather, all_to_all, reduce_scatter
from megatron.core.utils.groups import group_size


def exchange_rows(
    rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Send consecutive pieces of `rows` to the ranks of the group in turn.

    Shapes: [sum(send_counts), ...] -> [sum(recv_counts), ...], ordered by source rank.
    Host:   no synchronisation, the counts are on the host.
    Memory: keeps the counts for backward, never the rows.
    Grad:   the same exchange with the counts swapped.
    """
    if group_size(group) == 1:
        return rows
    return _Exchange.apply(rows, send_counts, recv_counts, group)


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Tell every rank how many rows come from here: int64 [W, n] by destination -> [W, n] by source."""
    if group_size(group) == 1:
        return counts
    received = torch.empty_like(counts)
    all_to_all(received, counts.contiguous(), group)
    return received


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' rows below each other: [T, ...] -> [W * T, ...]; its gradient is `reduce_rows`."""
    return rows if group_size(group) == 1 else _Gather.apply(rows, group)


def reduce_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over the ranks, each keeping its own part: [W * T, ...] -> [T, ...]; its gradient is `gather_rows`."""
    return rows if group_size(group) == 1 else _Reduce.apply(rows, group)


def gather_uneven_rows(rows: torch.Tensor, counts: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' rows below each other: [R, ...] -> [sum(counts), ...], where rank r has counts[r] rows.

    Grad: each rank gets the sum of what the ranks return for its rows.
    """
    if group_size(group) == 1:
        return rows
    if len(set(counts)) == 1:
        return gather_rows(rows, group)
    copies = rows.unsqueeze(0).expand(len(counts), *rows.shape).flatten(0, 1)
    return exchange_rows(copies, [rows.shape[0]] * len(counts), counts, group)


def reduce_uneven_rows(rows: torch.Tensor, counts: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over the ranks in their order, rank r keeping its counts[r] rows: [sum(counts), ...] -> [R, ...].

    Dtype: summed in fp32 at least, rounded once. Grad: the rows' gradients, gathered.
    """
    if group is None or group_size(group) == 1:
        return rows
    if len(set(counts)) == 1:
        return reduce_rows(rows, group)
    own = counts[group.rank()]
    summands = exchange_rows(rows, counts, [own] * len(counts), group)
    return summands.view(len(counts), own, *rows.shape[1:]).sum(dim=0)


def _exchange(rows: torch.Tensor, send: list[int], recv: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    received = rows.new_empty(sum(recv), *rows.shape[1:])
    all_to_all(received, rows.contiguous(), group, recv, send)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: list[int], recv: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.send, ctx.recv, ctx.group = send, recv, group
        return _exchange(rows, send, recv, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grad, ctx.recv, ctx.send, ctx.group), None, None, None


def _gathered(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    all_gather(out, rows.contiguous(), group)
    return out


def _reduced(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    reduce_scatter(out, rows.contiguous(), group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduced(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduced(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grad, ctx.group), None
