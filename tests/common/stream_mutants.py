"""Faults of streams and lifetimes, put in on purpose: each undoes one fix or breaks one rule of the combined schedule.

A mutant is a context manager that is entered in a rank's process before the model is built. What it replaces is named
by module or class and attribute; no file is edited.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import torch

from megatron.core import deferred_wgrad, streams
from megatron.core.distributed import distributed_data_parallel
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.executor import PlanRun
from megatron.core.pipeline_parallel.overlap.layer_plan import LayerPlan
from megatron.core.pipeline_parallel.overlap.nodes import StageNode
from megatron.core.pipeline_parallel.overlap.protocol import Stage
from megatron.core.pipeline_parallel.p2p import Mailbox
from megatron.core.streams import Event, Role
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from tests.common.mutants import replaced

Mutant = Iterator[None]
CPU = torch.device("cpu")
ALL_KEPT = frozenset({(Stage.EXPERTS, "rows"), (Stage.EXPERTS, "probs")})
"""What a layer declares whose experts save whatever they are given."""


# The four faults, undone.


@contextlib.contextmanager
def f1_wgrad_on_ambient_stream() -> Mutant:
    """Deferred weight gradients run on whatever stream is current, here that of communication."""

    def weight_grads(self: StageNode) -> int:
        if not self.queue:
            return 0
        waiting = len(self.queue)
        with streams.on(Role.COMM):
            self.queue.flush()
        return waiting

    with replaced(StageNode, "weight_grads", weight_grads):
        yield


class ShadowRows(torch.autograd.Function):
    """Rows [R, h] as experts of low precision see them: what is kept for backward is a copy of one byte per element."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        codes = (rows.float().clamp(-4, 4) * 31 + 128).to(torch.uint8)
        ctx.save_for_backward(codes)
        return ((codes.float() - 128) / 31).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (codes,) = ctx.saved_tensors
        return grad * ((codes > 4) & (codes < 252))


@contextlib.contextmanager
def shadowed_experts() -> Mutant:
    """No fault: experts that keep a shadow of their rows and say so, as FP8 experts do."""
    plain = GroupedMLP.forward

    def forward(self: GroupedMLP, rows: torch.Tensor, *args: Any) -> Any:
        return plain(self, ShadowRows.apply(rows), *args)

    with replaced(GroupedMLP, "forward", forward), replaced(GroupedMLP, "saves_rows", False):
        yield


@contextlib.contextmanager
def f2_rows_kept() -> Mutant:
    """Every layer says that its experts save their rows."""
    with replaced(MoELayer, "saved_inputs", lambda self: ALL_KEPT):
        yield


@contextlib.contextmanager
def f2_shadowed_rows_kept() -> Mutant:
    """The rows of these are kept until backward all the same."""
    with shadowed_experts(), f2_rows_kept():
        yield


class ReadsCounts(torch.autograd.Function):
    """Rows [R, h] as they are; their counts [n] are read in forward, backward and with the deferred weight gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        ctx.queue = deferred_wgrad.active_queue()
        counts.sum()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (counts,) = ctx.saved_tensors
        counts.sum()
        if ctx.queue is not None:
            ctx.queue.put([], lambda: counts.sum() and None)
        return grad, None


@contextlib.contextmanager
def experts_that_read_counts() -> Mutant:
    """No fault: experts whose kernels take the counts of the dispatcher from the device, up to the last product."""
    plain = GroupedMLP.forward

    def forward(self: GroupedMLP, rows: torch.Tensor, tokens_per_expert: torch.Tensor, *args: Any) -> Any:
        return plain(self, ReadsCounts.apply(rows, tokens_per_expert), tokens_per_expert, *args)

    with replaced(GroupedMLP, "forward", forward):
        yield


@contextlib.contextmanager
def f3_counts_freed_early() -> Mutant:
    """Counts made on comm and read on compute go with their last reference, whoever still reads them."""

    def close(self: LayerPlan) -> None:
        self.call.dispatch_state = None
        self._nodes.clear()

    with experts_that_read_counts(), replaced(LayerPlan, "close", close):
        yield


@contextlib.contextmanager
def f4_saved_rows_released() -> Mutant:
    """The rows of the experts are released after their forward although autograd saved that storage."""
    plain = StageNode.forward

    def forward(self: StageNode, *inputs: Any, **options: Any) -> Any:
        outputs = plain(self, *inputs, **options)
        if self.name.endswith(Stage.EXPERTS.value):
            with streams.on(self.role):
                streams.release(inputs[0].tensor, inputs[0].owner)
        return outputs

    with replaced(StageNode, "forward", forward):
        yield


# Other races that such schedules have had.


@contextlib.contextmanager
def event_of_the_wrong_stream() -> Mutant:
    """An event is recorded on one stream and waited for as if it stood for the other."""
    plain = streams.record

    def record() -> Event:
        if sys._getframe(1).f_code is streams.join.__code__:
            return plain()
        with streams.on(streams.current_role().other):
            return plain()

    with replaced(streams, "record", record):
        yield


@contextlib.contextmanager
def storage_resized_without_waiting() -> Mutant:
    """What should be held for its owner is emptied at once."""
    with replaced(streams, "hold", lambda tensor, owner: streams.empty_storage(tensor)):
        yield


@contextlib.contextmanager
def gradient_buffer_on_comm() -> Mutant:
    """Gradient buffers are allocated while the communication stream is current."""
    plain = ParamAndGradBuffer.__init__

    def init(self: ParamAndGradBuffer, *args: Any, **kwargs: Any) -> None:
        with streams.step(CPU), streams.on(Role.COMM, "construction"):
            plain(self, *args, **kwargs)

    with replaced(ParamAndGradBuffer, "__init__", init):
        yield


@contextlib.contextmanager
def wgrad_buffer_reused() -> Mutant:
    """Products go through one buffer, which comm adds to the gradients and the next product overwrites at once."""
    buffers: dict[tuple[int, ...], torch.Tensor] = {}

    def add_gradient(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        buffer = buffers.setdefault(tuple(grad.shape), torch.zeros_like(grad))
        buffer.copy_(grad)
        ready = streams.record()
        with streams.on(Role.COMM, "reduction of a product"):
            streams.wait(ready)
            param.main_grad.add_(buffer)

    with (
        replaced(deferred_wgrad, "_add_gradient", add_gradient),
        replaced(deferred_wgrad.WgradSink, "_add_to_main_grads", lambda self, product: False),
    ):
        yield


@contextlib.contextmanager
def one_event_as_baton() -> Mutant:
    """All nodes of both streams record one and the same event."""
    plain, baton = streams.record, []

    def record() -> Event:
        event = plain()
        baton.append(event)
        shared = baton[0]
        for field in dataclasses.fields(Event):
            object.__setattr__(shared, field.name, getattr(event, field.name))
        observer = streams._STATE.observer
        if observer is not None:
            observer.on_record(shared)
        return shared

    with replaced(streams, "record", record):
        yield


@contextlib.contextmanager
def gradient_hook_on_comm() -> Mutant:
    """The hook that hands a gradient to its bucket runs on the communication stream."""
    plain = distributed_data_parallel._on_grad_of

    def on_grad_of(owner: Any, param: torch.nn.Parameter) -> None:
        with streams.on(Role.COMM, "gradient hook"):
            plain(owner, param)

    with replaced(distributed_data_parallel, "_on_grad_of", on_grad_of):
        yield


class _Fork(torch.autograd.Function):
    """Goes to comm in forward, comes back from it in backward, there without waiting."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, switch: list[Any]) -> torch.Tensor:
        ctx.switch = switch
        _enter_comm(switch)
        return hidden * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad * 1
        ctx.switch.pop().close()
        return grad, None


class _Join(torch.autograd.Function):
    """Comes back from comm in forward and waits for it; goes there in backward."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, switch: list[Any]) -> torch.Tensor:
        ctx.switch = switch
        done = streams.record()
        switch.pop().close()
        streams.wait(done)
        return output * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _enter_comm(ctx.switch)
        return grad * 1, None


def _enter_comm(switch: list[Any]) -> None:
    """Change to comm behind what the current stream was given."""
    ready, stack = streams.record(), contextlib.ExitStack()
    stack.enter_context(streams.on(Role.COMM))
    streams.wait(ready)
    switch.append(stack)


@contextlib.contextmanager
def shared_experts_not_joined_in_backward() -> Mutant:
    """Shared experts run beside the others, and only forward waits for them."""
    plain = SharedExpertMLP.forward

    def forward(self: SharedExpertMLP, hidden: torch.Tensor) -> torch.Tensor:
        switch: list[Any] = []
        return _Join.apply(plain(self, _Fork.apply(hidden, switch)), switch)

    with replaced(SharedExpertMLP, "forward", forward):
        yield


class _ReadsMetadata(torch.autograd.Function):
    """Multiplies rows [R, h] by a buffer [1] of ones, in forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.buffer = buffer.detach()
        return rows * buffer

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.buffer, None


@contextlib.contextmanager
def metadata_overwritten() -> Mutant:
    """The dispatcher keeps metadata in one buffer of the layer, which the next microbatch's dispatch writes."""
    plain_dispatch, plain_experts = MoELayer.dispatch, MoELayer.experts_compute

    def dispatch(self: MoELayer, rows: torch.Tensor, probs: torch.Tensor, state: Any) -> Any:
        buffer = getattr(self, "metadata", None)
        if buffer is None:
            buffer = self.metadata = torch.ones(1, dtype=rows.dtype)
        buffer.fill_(1)
        return plain_dispatch(self, rows, probs, state)

    def experts_compute(self: MoELayer, rows: torch.Tensor, probs: torch.Tensor, state: Any) -> Any:
        return plain_experts(self, _ReadsMetadata.apply(rows, self.metadata), probs, state)

    with replaced(MoELayer, "dispatch", dispatch), replaced(MoELayer, "experts_compute", experts_compute):
        yield


@contextlib.contextmanager
def sent_output_released() -> Mutant:
    """What goes to the next pipeline stage is released as soon as its send was posted."""
    plain = Mailbox.post

    def post(self: Mailbox, actions: Any, fetch: Any) -> None:
        plain(self, actions, fetch)
        for action in actions:
            if action.kind is ActionKind.SEND:
                tensor, _ = self._leaving[action.direction, action.peer]
                # Said, not done: gloo reads the memory while the peer is not there yet.
                streams._STATE.observer.on_release(tensor)

    with replaced(Mailbox, "post", post):
        yield


@contextlib.contextmanager
def last_weight_gradients_left_out() -> Mutant:
    """Nobody computes what a backward of a pipeline left for the time behind its messages."""
    plain = PlanRun._run

    def run(self: PlanRun, action: Action) -> None:
        if action.kind is not ActionKind.WGRAD:
            plain(self, action)

    with replaced(PlanRun, "_run", run):
        yield
