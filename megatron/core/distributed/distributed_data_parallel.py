"""Data parallelism: main gradients in contiguous buffers, reduced bucket by bucket over the replicas.

One step:

    zero_grad_buffer()
    with no_sync():  forward, backward        all microbatches but the last: gradients only accumulate
    forward, backward                         the last: with overlap, full buckets start reducing during backward
    finish_grad_sync()                        starts what has not started, waits for all
    start_param_sync()                        by the distributed optimizer, after it has updated its shards

    compute  | bwd layer 3 | bwd layer 2 | bwd layer 1 | bwd layer 0 |
    comm                   | bucket 0: 3, 2            | bucket 1: 1, 0 |

Buckets start in one fixed order, the one in which reverse registration fills them, in whatever order they become full:
every rank then issues the same sequence of collectives also where, say, an expert without tokens finishes early.
"""

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import step_guard
from megatron.core.configs.parallel import ModelParallelConfig
from megatron.core.deferred_wgrad import forget_deferred, is_wgrad_deferred, set_gradient_report
from megatron.core.distributed.bucket_group import BucketGroup, BucketParams
from megatron.core.distributed.ddp_config import DistributedDataParallelConfig
from megatron.core.distributed.grad_scaling import GradReduction, grad_reduction
from megatron.core.distributed.param_and_grad_buffer import (
    ParamAndGradBuffer,
    get_main_grad,
    main_grad_dtype,
    packed_units,
)
from megatron.core.distributed.param_gather import ParamGather
from megatron.core.distributed.param_layout import BufferLayout, bucket_alignment, default_bucket_size, plan_buffer
from megatron.core.param_attrs import is_shared_embedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.collectives import broadcast
from megatron.core.utils.groups import group_rank, group_size
from megatron.core.utils.logging import get_rank


def is_expert_parameter(param: torch.nn.Parameter) -> bool:
    """True if the replicas of `param` are the expert data parallel ranks, not all data parallel ranks."""
    return not getattr(param, "allreduce", True)


def _on_grad_of(owner: "weakref.ref[DistributedDataParallel]", param: torch.nn.Parameter) -> None:
    """Tell the wrapper, if it still exists, that autograd has accumulated the gradient of `param`."""
    wrapper = owner()
    if wrapper is not None:
        wrapper._on_grad(param)


def _on_ready_of(owner: "weakref.ref[DistributedDataParallel]", param: torch.nn.Parameter) -> None:
    """Tell the wrapper, if it still exists, that the last deferred weight gradient of `param` is computed."""
    wrapper = owner()
    if wrapper is not None:
        wrapper._on_grad(param)


class DistributedDataParallel(torch.nn.Module):
    """Wraps a model chunk; gradients end in `param.main_grad`, never in `param.grad`.

    A parameter whose weight gradient waits in a `WgradQueue` is reported by the queue, after the gradient was added to
    `main_grad`. Other code that computes weight gradients after backward sets `skip_backward_post_hook = True` on the
    parameter and calls `mark_param_ready`.
    """

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Allocate the buffers and install the hooks; communicates nothing."""
        super().__init__()
        self.module = module
        self.config = config
        self.ddp_config = ddp_config
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        self._position = {param: i for i, param in enumerate(self.params.values())}
        self._bucket_size = self._choose_bucket_size(disable_bucketing)
        self.buffers_by_kind: dict[tuple[torch.dtype, bool], ParamAndGradBuffer] = {}
        self.bucket_groups: list[BucketGroup] = []
        for kind in sorted({self._kind(param) for param in self.params.values()}, key=str):
            self._build_buffer(kind)
        self._order_buckets()
        self.param_gather: ParamGather | None = None
        if ddp_config.use_distributed_optimizer:
            self.param_gather = ParamGather(self.bucket_groups[::-1], module, ddp_config.overlap_param_gather)
        self._bucket_of = {param: bucket for bucket in self.bucket_groups for param in bucket.params.values()}
        # an fp16 overflow is no fault: the optimizer finds it, skips the step and lowers the loss scale
        self._checks_gradients = ddp_config.check_for_nan_in_grad and not config.fp16
        self._num_started = 0
        self._is_last_microbatch = True
        # A strong reference from a parameter's hook closes a cycle through C++ that the garbage collector cannot see:
        # model, buffers and process groups would live for ever.
        owner: weakref.ref[DistributedDataParallel] = weakref.ref(self)
        self._hooks = [
            param.register_post_accumulate_grad_hook(functools.partial(_on_grad_of, owner))
            for param in self.params.values()
        ]
        for param in self.params.values():
            set_gradient_report(param, functools.partial(_on_ready_of, owner))

    # Construction.

    @staticmethod
    def _kind(param: torch.nn.Parameter) -> tuple[torch.dtype, bool]:
        return param.dtype, is_expert_parameter(param)

    def _choose_bucket_size(self, disable_bucketing: bool) -> int | None:
        """Elements per bucket; None means one bucket: splitting gains nothing without overlap or on later stages."""
        cfg = self.ddp_config
        if disable_bucketing or not cfg.overlap_grad_reduce or group_rank(self.pg_collection.pp) > 0:
            return None
        if cfg.num_buckets is not None:
            return max(1, sum(param.numel() for param in self.params.values()) // cfg.num_buckets)
        return cfg.bucket_size or default_bucket_size(group_size(self.pg_collection.dp_cp))

    def _reduction(self, is_expert: bool) -> tuple[GradReduction, dist.ProcessGroup | None]:
        groups = self.pg_collection
        reduction = grad_reduction(
            is_expert=is_expert,
            dp_cp_size=group_size(groups.dp_cp),
            expt_dp_size=group_size(groups.expt_dp),
            per_token_loss=self.config.calculate_per_token_loss,
            average_in_collective=self.ddp_config.average_in_collective,
        )
        return reduction, groups.expt_dp if is_expert else groups.dp_cp

    def _build_buffer(self, kind: tuple[torch.dtype, bool]) -> None:
        """Lay out the parameters of one kind and cut their buffer into buckets."""
        cfg = self.ddp_config
        named = [(name, param) for name, param in self.params.items() if self._kind(param) == kind]
        reduction, group = self._reduction(is_expert=kind[1])
        layout = self._plan([param for _, param in named], group)
        dtype = main_grad_dtype(kind[0], bool(cfg.grad_reduce_in_fp32))
        buffer = ParamAndGradBuffer(dict(named), dtype, layout, holds_params=cfg.use_distributed_optimizer)
        self.buffers_by_kind[kind] = buffer
        for bucket in layout.buckets:
            members = dict(named[i] for i in bucket.params)
            data = buffer.grad_data[bucket.start : bucket.end]
            sharded = None
            if buffer.param_data is not None:
                offsets = tuple(layout.offsets[i] - bucket.start for i in bucket.params)
                sharded = BucketParams(buffer.param_data[bucket.start : bucket.end], offsets)
            self.bucket_groups.append(BucketGroup(len(self.bucket_groups), members, data, reduction, group, sharded))

    def _plan(self, params: list[torch.nn.Parameter], group: dist.ProcessGroup | None) -> BufferLayout:
        alignment = bucket_alignment(group_size(group), self.ddp_config.pad_buckets_for_high_nccl_busbw)
        alone = [i for i, param in enumerate(params) if is_shared_embedding(param)]
        sizes = [param.numel() for param in params]
        return plan_buffer(sizes, self._bucket_size, alignment, packed_units(params), alone)

    def _order_buckets(self) -> None:
        """Sort by the parameter that backward reaches last, and number the buckets anew."""
        self.bucket_groups.sort(key=lambda b: -min(self._position[param] for param in b.params.values()))
        for index, bucket in enumerate(self.bucket_groups):
            bucket.index = index

    # Backward.

    def _on_grad(self, param: torch.nn.Parameter) -> None:
        """Move a fresh gradient into the buffer; autograd calls this once per backward, also for a None gradient.

        While something of the parameter is deferred, what came through autograd waits for it in `param.grad`.
        """
        if is_wgrad_deferred(param):
            return
        if param.grad is not None:
            get_main_grad(param).add_(param.grad)
            param.grad = None
        if not getattr(param, "skip_backward_post_hook", False):
            self.mark_param_ready(param)

    def mark_param_ready(self, param: torch.nn.Parameter) -> None:
        """Note that `main_grad` of `param` is complete; counts only with overlap and in the last microbatch."""
        if not (self.ddp_config.overlap_grad_reduce and self._is_last_microbatch):
            return
        self._bucket_of[param].mark_ready(param)
        while self._num_started < len(self.bucket_groups) and self.bucket_groups[self._num_started].is_full:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self.bucket_groups[self._num_started]
        if self._checks_gradients and step_guard.active() is None:
            bucket.raise_if_not_finite()
        bucket.start(async_op=self.ddp_config.overlap_grad_reduce)
        self._num_started += 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: gradients of this microbatch are not the last ones."""
        before, self._is_last_microbatch = self._is_last_microbatch, False
        try:
            yield
        finally:
            self._is_last_microbatch = before

    # The step.

    def start_grad_sync(self) -> None:
        """Start every reduction that backward has not started; with overlap all parameters must be ready."""
        self._raise_if_deferred()
        if self.ddp_config.overlap_grad_reduce:
            self._raise_if_missing()
        while self._num_started < len(self.bucket_groups):
            self._start_next()

    def finish_grad_sync(self) -> None:
        """Start what is left and wait until every gradient is reduced."""
        self.start_grad_sync()
        for bucket in self.bucket_groups:
            bucket.finish()

    def _raise_if_missing(self) -> None:
        missing = [name for bucket in self.bucket_groups[self._num_started :] for name in bucket.missing_names()]
        if missing:
            raise RuntimeError(
                f"rank {get_rank()}: overlap_grad_reduce=True: no gradient arrived in the last microbatch for "
                f"{', '.join(missing)}; a bucket starts when all its parameters took part in backward, so use the "
                "parameter in forward, set its requires_grad to False, or drop --overlap-grad-reduce."
            )

    def _raise_if_deferred(self) -> None:
        waiting = [name for name, param in self.params.items() if is_wgrad_deferred(param)]
        if waiting:
            raise RuntimeError(
                f"rank {get_rank()}: weight gradients of {', '.join(waiting)} still wait in a queue; flush each "
                "WgradQueue before the gradients are reduced."
            )

    def zero_grad_buffer(self) -> None:
        """Clear the gradients and begin a new step."""
        for param in self.params.values():
            forget_deferred(param)
        for buffer in self.buffers_by_kind.values():
            buffer.zero()
        for bucket in self.bucket_groups:
            bucket.reset()
        self._num_started = 0

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by a number or a one-element tensor []; only after the reduction."""
        for bucket in self.bucket_groups:
            bucket.scale(factor)

    def start_param_sync(self) -> None:
        """Gather the parameters whose shards were updated; with overlap they arrive during the next forward pass."""
        assert self.param_gather is not None, "use_distributed_optimizer=False: every rank holds whole parameters"
        self.param_gather.start()

    def finish_param_sync(self) -> None:
        """Complete all parameters; to be called before they are read outside a forward pass."""
        if self.param_gather is not None:
            self.param_gather.finish()
            for bucket in self.bucket_groups:
                bucket.complete_values()

    def forget_codes(self) -> None:
        """Let FP8 layers quantise their weights themselves: all parameters were given new values."""
        for bucket in self.bucket_groups:
            bucket.forget_codes()

    def broadcast_params(self) -> None:
        """Give all replicas of a parameter the values of the first one."""
        self.finish_param_sync()
        for param in self.module.parameters():
            group = self.pg_collection.expt_dp if is_expert_parameter(param) else self.pg_collection.dp_cp
            broadcast(param.data, group)
        self.forget_codes()

    # The wrapped module shines through.

    def global_name(self, local_name: str) -> str:
        """Name of a parameter without the level that this wrapper adds."""
        return local_name.removeprefix("module.")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The wrapped module's, without a prefix."""
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, without a prefix."""
        self.finish_param_sync()
        self.forget_codes()
        return self.module.load_state_dict(*args, **kwargs)
