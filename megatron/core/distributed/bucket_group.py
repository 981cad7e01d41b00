"""The parameters whose gradients travel in one collective, as a small state machine.

    COLLECTING --mark_ready*--> COLLECTING --start--> REDUCING --finish--> REDUCED --reset--> COLLECTING

`reset` is also allowed while collecting: an evaluation or an aborted step leaves the bucket there. An assertion guards
each transition. Who decides when a full bucket starts is the wrapper, which starts them in one fixed order.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megatron.core.distributed.grad_scaling import GradReduction
from megatron.core.distributed.param_and_grad_buffer import get_main_grad
from megatron.core.distributed.param_layout import shard_range
from megatron.core.errors import DivergenceError
from megatron.core.utils.collectives import all_gather, all_reduce, reduce_scatter
from megatron.core.utils.groups import group_rank, group_size
from megatron.core.utils.logging import get_rank


class BucketState(enum.Enum):
    """Where a bucket stands within a step."""

    COLLECTING = "collecting gradients"
    REDUCING = "being reduced"
    REDUCED = "reduced"


@dataclass(frozen=True)
class BucketParams:
    """The parameters of a bucket as one tensor; with it a bucket is sharded (ZeRO-1)."""

    data: torch.Tensor
    """[elements of the bucket], laid out as its gradients; the parameters are views of it"""
    offsets: tuple[int, ...]
    """where each parameter begins"""


class CodedGather(Protocol):
    """A gather in which the weights of FP8 layers travel as codes instead of values."""

    def start(self, async_op: bool) -> None:
        """Launch it; with `async_op` it runs until it is waited for."""

    def finish(self) -> None:
        """Wait for it, and hand out what came."""

    def forget(self) -> None:
        """Let layers quantise their weights themselves: the parameters have new values."""


class BucketGroup:
    """One bucket: its parameters by name, its slice of the buffer and the way it is reduced.

    A sharded bucket is reduced by a reduce-scatter in place: afterwards `grad_shard` [elements / ranks] is complete,
    the rest is not. Its parameters come back by an all-gather in place, from each rank's `param_shard`.
    """

    def __init__(
        self,
        index: int,
        params: dict[str, torch.nn.Parameter],
        grad_data: torch.Tensor,
        reduction: GradReduction,
        group: dist.ProcessGroup | None,
        sharded: BucketParams | None = None,
    ) -> None:
        """Take over `grad_data` [elements of the bucket], which the parameters' main_grad are views of."""
        self.index = index
        self.params = params
        self.grad_data = grad_data
        self.reduction = reduction
        self.group = group
        self.sharded = sharded
        rank, num_shards = (group_rank(group), group_size(group)) if sharded else (0, 1)
        begin, end = shard_range(grad_data.numel(), rank, num_shards)
        self.grad_shard = grad_data[begin:end]
        self.param_shard = None if sharded is None else sharded.data[begin:end]
        self.state = BucketState.COLLECTING
        self._names = {param: name for name, param in params.items()}
        self._ready: set[torch.nn.Parameter] = set()
        self._handle: dist.Work | None = None
        self._gather_handle: dist.Work | None = None
        self.coded: CodedGather | None = None
        """How parameters come back, if not all as values; set by the owner of the shards."""
        self._has_all_values = True

    @property
    def is_full(self) -> bool:
        """True once every parameter is ready."""
        return len(self._ready) == len(self.params)

    def missing_names(self) -> list[str]:
        """Names of the parameters that are not ready."""
        return [name for name, param in self.params.items() if param not in self._ready]

    def mark_ready(self, param: torch.nn.Parameter) -> None:
        """Note that the gradient of `param` is complete for this step."""
        name = self._names[param]
        self._expect(BucketState.COLLECTING, f"parameter {name!r} was marked ready")
        assert param not in self._ready, (
            f"bucket {self.index}: parameter {name!r} was marked ready twice in one step; run all microbatches but the "
            "last under no_sync(), and call zero_grad_buffer() between steps"
        )
        self._ready.add(param)

    def start(self, async_op: bool) -> None:
        """Scale and launch the collective; with `async_op` it runs beside backward until `finish`."""
        self._expect(BucketState.COLLECTING, "its reduction was started")
        self.state = BucketState.REDUCING
        if self.reduction.factor != 1.0:
            self.grad_data.mul_(self.reduction.factor)
        op = self.reduction.op
        if self.sharded is None:
            self._handle = all_reduce(self.grad_data, self.group, op, async_op=async_op)
        else:
            self._handle = reduce_scatter(self.grad_shard, self.grad_data, self.group, op, async_op=async_op)

    def finish(self) -> None:
        """Wait for the collective; on an accelerator the current stream waits, not the host."""
        self._expect(BucketState.REDUCING, "its reduction was waited for")
        if self._handle is not None:
            self._handle.wait()
        self._handle = None
        self.state = BucketState.REDUCED

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the reduced gradients by a number or a one-element tensor [1] or []."""
        self._expect(BucketState.REDUCED, "its gradients were scaled")
        self.grad_shard.mul_(factor)

    def start_param_gather(self, async_op: bool) -> None:
        """Launch the all-gather of a sharded bucket's parameters; with `async_op` it runs until it is waited for."""
        assert self.sharded is not None, f"bucket {self.index} is not sharded"
        assert self.param_shard is not None, f"bucket {self.index} is not sharded"
        if self.coded is not None:
            self._has_all_values = False
            self.coded.start(async_op)
            return
        self._gather_handle = all_gather(self.sharded.data, self.param_shard, self.group, async_op=async_op)

    def finish_param_gather(self) -> None:
        """Wait for the all-gather; on an accelerator the current stream waits, not the host."""
        if self.coded is not None:
            self.coded.finish()
            return
        if self._gather_handle is not None:
            self._gather_handle.wait()
        self._gather_handle = None

    def complete_values(self) -> None:
        """Gather the values of parameters of which only codes have travelled; every rank of the group must call it."""
        if self._has_all_values:
            return
        assert self.sharded is not None, f"bucket {self.index} is not sharded"
        assert self.param_shard is not None, f"bucket {self.index} is not sharded"
        all_gather(self.sharded.data, self.param_shard, self.group)
        self._has_all_values = True

    def forget_codes(self) -> None:
        """The parameters were given values from elsewhere, on every rank alike."""
        self._has_all_values = True
        if self.coded is not None:
            self.coded.forget()

    def reset(self) -> None:
        """Forget the step; the gradients themselves are cleared with the whole buffer."""
        assert self.state is not BucketState.REDUCING, (
            f"bucket {self.index} was reset while {self.state.value}; call finish_grad_sync() first"
        )
        self._ready.clear()
        self.state = BucketState.COLLECTING

    def raise_if_not_finite(self) -> None:
        """Raise naming rank, bucket and parameters if a gradient is NaN or infinite; one host read."""
        if bool(torch.isfinite(torch.linalg.vector_norm(self.grad_data, ord=float("inf")))):
            return
        bad = [name for name, param in self.params.items() if not bool(get_main_grad(param).isfinite().all())]
        raise DivergenceError(
            f"rank {get_rank()}: check_for_nan_in_grad=True: NaN or infinity in the gradient of {', '.join(bad)} "
            f"(bucket {self.index}, before its reduction); look for the first bad loss, lower the learning rate, or "
            "let the run go on with --no-check-for-nan-in-loss-and-grad."
        )

    def _expect(self, state: BucketState, event: str) -> None:
        assert self.state is state, f"bucket {self.index}: {event} while {self.state.value}, expected {state.value}"
