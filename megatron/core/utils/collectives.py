"""Collectives over a group that may be absent, under one name each, and a note of the last one that began.

None is a group of one rank and communicates nothing. torch renames collectives between releases (the reduce-scatter and
all-gather of one tensor were called `reduce_scatter_tensor` and `all_gather_into_tensor` before they became
`..._single`); the choice is made here, once. Every collective of this tree goes through this file, so that a run that
hangs can say where each rank stands (`last_collective`, read by training/heartbeat.py).
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.utils.groups import group_size

SUM = dist.ReduceOp.SUM
AVG = dist.ReduceOp.AVG
MAX = dist.ReduceOp.MAX
MIN = dist.ReduceOp.MIN

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LastCollective:
    """The collective that began last in this process, and how many began before it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.operation = "none"
        self.count = 0
        self.waits_for_message = False
        self._group: dist.ProcessGroup | None = None

    def note(self, operation: str, group: dist.ProcessGroup | None) -> None:
        """Called before each collective; costs three assignments."""
        self.operation = operation
        self.count += 1
        self._group = group

    @property
    def group(self) -> str:
        """What the group is for: tp, ep, dp, ..., or world."""
        if self._group is None:
            return "none"
        return "world" if self._group is dist.group.WORLD else self._group.group_desc


last_collective = LastCollective()


class DeviceWaits:
    """Who waits for peers in kernels of this tree, where torch's watchdog sees nothing.

    A kernel that has waited too long notes its peer in pinned memory and stops the device; the host then sees an error
    that says nothing, and asks here.
    """

    def __init__(self) -> None:
        self._descriptions: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, waiter: Any) -> None:
        """Ask `waiter.lost_peers()`, a text, empty if none is lost, for as long as it lives."""
        self._descriptions.add(waiter)

    def lost_peers(self) -> str:
        """The peers that kernels gave up on; empty if there are none. Host: no synchronisation."""
        return "; ".join(filter(None, (waiter.lost_peers() for waiter in self._descriptions)))


device_waits = DeviceWaits()


def world_group() -> dist.ProcessGroup | None:
    """The group of all ranks; None in a process that is alone."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = SUM, async_op: bool = False
) -> dist.Work | None:
    """Reduce [...] in place over `group`; with `async_op` the returned handle must be waited for."""
    if group_size(group) == 1:
        return None
    last_collective.note("all_reduce", group)
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def warm_up(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Use every group once: NCCL makes a communicator when it is first needed, which it cannot during a graph capture.

    All ranks pass their groups in the same order.
    """
    for group in groups:
        all_reduce(torch.zeros(1, device=device), group)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None, group_src: int = 0) -> None:
    """Overwrite [...] in place by the tensor of the rank `group_src` of `group`."""
    if group_size(group) > 1:
        last_collective.note("broadcast", group)
        dist.broadcast(tensor, group=group, group_src=group_src)


def reduce_scatter(
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce `tensor` [n * size, ...] over `group` and keep slice `rank` of it in `output` [n, ...].

    `output` may be that slice of `tensor` itself; the other slices keep what they hold. With `async_op` the returned
    handle must be waited for.
    """
    if group_size(group) == 1:
        _copy_unless_same(output, tensor)
        return None
    last_collective.note("reduce_scatter", group)
    return _reduce_scatter(output, tensor, op=op, group=group, async_op=async_op)


def all_gather(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Put the ranks' `tensor` [n, ...] below each other, in rank order, into `output` [n * size, ...].

    `tensor` may be slice `rank` of `output` itself. With `async_op` the returned handle must be waited for.
    """
    if group_size(group) == 1:
        _copy_unless_same(output, tensor)
        return None
    last_collective.note("all_gather", group)
    return _all_gather(output, tensor, group=group, async_op=async_op)


def _copy_unless_same(output: torch.Tensor, tensor: torch.Tensor) -> None:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)


def all_to_all(
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    recv_counts: list[int] | None = None,
    send_counts: list[int] | None = None,
) -> None:
    """Send consecutive pieces of `tensor` [sum(send), ...] to the ranks in turn; `output` is [sum(recv), ...].

    Without counts the pieces are of equal size.
    """
    if group_size(group) == 1:
        output.copy_(tensor)
        return
    last_collective.note("all_to_all", group)
    dist.all_to_all_single(output, tensor, recv_counts, send_counts, group=group)


class Shift:
    """A tensor on its way around a ring: what was sent must stay as it is until `wait`."""

    def __init__(self, sent: torch.Tensor, coming: torch.Tensor, work: dist.Work | None) -> None:
        self._sent, self._coming, self._work = sent, coming, work

    def wait(self) -> torch.Tensor:
        """Return what came from the rank before [...]; the current stream waits for it."""
        if self._work is not None:  # None: torch has already finished it
            self._work.wait()
        return self._coming


def start_shift(tensor: torch.Tensor, group: dist.ProcessGroup) -> Shift:
    """Send `tensor` [...] to the next rank of `group` and receive one of the same shape from the rank before.

    It is an all-to-all in which all pieces but one are empty: no order of sends and receives that could lock up.
    """
    rank, size = group.rank(), group.size()
    rows = tensor.contiguous().flatten()
    coming = torch.empty_like(rows)
    send_counts, recv_counts = [0] * size, [0] * size
    send_counts[(rank + 1) % size] = recv_counts[(rank - 1) % size] = rows.numel()
    last_collective.note("shift", group)
    work = dist.all_to_all_single(coming, rows, recv_counts, send_counts, group=group, async_op=True)
    return Shift(rows, coming.view(tensor.shape), work)


@dataclass(frozen=True)
class Message:
    """One tensor [...] to or from one rank of a group."""

    tensor: torch.Tensor
    peer: int
    """Rank in the group."""
    is_sent: bool


def post_messages(messages: Sequence[Message], group: dist.ProcessGroup | None, as_batch: bool) -> list[dist.Work]:
    """Start sending and receiving, in order; returns one handle for each message, or one for all of a batch.

    A batch uses the communicator of the whole group and its messages run at the same time; alone, each uses that of the
    two ranks. Both ends must do the same. The tensors must live until their handle was waited for.
    """
    last_collective.note("messages", group)
    calls = [(dist.isend if message.is_sent else dist.irecv, message) for message in messages]
    if as_batch:
        return dist.batch_isend_irecv([dist.P2POp(op, m.tensor, group=group, group_peer=m.peer) for op, m in calls])
    works = []
    for op, message in calls:
        ends = {"group_dst": message.peer} if message.is_sent else {"group_src": message.peer}
        works.append(op(message.tensor, group=group, **ends))
    return works


def wait_for_messages(works: list[dist.Work]) -> None:
    """Wait for messages and empty the list, so that none is waited for twice.

    Host: waits with gloo; with NCCL only the current stream does.
    """
    last_collective.waits_for_message = bool(works)
    while works:
        works.pop().wait()
    last_collective.waits_for_message = False


def barrier(group: dist.ProcessGroup | None) -> None:
    """Wait until all ranks of `group` are here."""
    if group_size(group) > 1:
        last_collective.note("barrier", group)
        dist.barrier(group=group)


def all_gather_object(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The ranks' picklable values, in rank order, on every rank."""
    values: list[Any] = [value] * group_size(group)
    if len(values) > 1:
        last_collective.note("all_gather_object", group)
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, group: dist.ProcessGroup | None, group_src: int = 0) -> Any:
    """The picklable value of rank `group_src` of the group, on every rank."""
    values = [value]
    if group_size(group) > 1:
        last_collective.note("broadcast_object", group)
        dist.broadcast_object_list(values, group=group, group_src=group_src)
    return values[0]


def gather_object(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The ranks' picklable values on the first rank of the group, an empty list elsewhere."""
    if group_size(group) == 1:
        return [value]
    is_first = dist.get_rank(group) == 0
    values: list[Any] = [None] * group_size(group) if is_first else []
    last_collective.note("gather_object", group)
    dist.gather_object(value, values if is_first else None, group=group, group_dst=0)
    return values


def scatter_object(values: list[Any], group: dist.ProcessGroup | None) -> Any:
    """The value that the first rank of the group has for this rank; others pass an empty list."""
    if group_size(group) == 1:
        return values[0]
    out: list[Any] = [None]
    last_collective.note("scatter_object", group)
    dist.scatter_object_list(out, values or None, group=group, group_src=0)
    return out[0]
