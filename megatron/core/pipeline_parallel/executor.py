"""Runs a plan, whatever schedule it came from.

The executor hands messages over: what an action reads is waited for just before it, what it made is put aside for its
SEND. A worker does the computing in between.

A chunk reduces gradients with the microbatch whose backward is its last one: actions of the others, the W of a backward
among them, run under `no_sync`.

Legend: s sequence of this rank, b micro batch, h hidden size.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.pipeline_parallel.actions import Action, ActionKind, Direction
from megatron.core.pipeline_parallel.p2p import Key, Mailbox
from megatron.core.pipeline_parallel.step import StepContext, forward_step, output_gradient

Tensor = torch.Tensor


class Worker(Protocol):
    """Does the actions, and keeps what a forward leaves for its backward.

    `received` [s, b, h] is the output of the stage before, None in the first stage; `grad` [s, b, h] is the gradient of
    the output, None in the last stage. Outputs and gradients of the input, [s, b, h], come back.
    """

    def streams(self) -> AbstractContextManager[None]:
        """The streams that the actions of a step run on."""
        ...

    def forward(self, action: Action, received: Tensor | None) -> Tensor:
        """Run the forward of a microbatch in a chunk; the last stage returns its loss []."""
        ...

    def backward(self, action: Action, grad: Tensor | None) -> Tensor | None:
        """Run its backward; the first stage returns None."""
        ...

    def overlap(self, action: Action, received: Tensor | None, grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run a pair of both."""
        ...

    def weight_grads(self, action: Action) -> None:
        """Compute what a backward left to the W of its microbatch."""
        ...

    def finish(self) -> None:
        """Every forward that needed a backward had it."""
        ...


@dataclass
class Held:
    """What a microbatch needs between forward and backward in one chunk.

    The output of a stage is not held: it belongs to its message and is free once it was sent.
    """

    received: Tensor | None
    """Input of the chunk [s, b, h], a leaf; None in the first stage."""
    edge: GradientEdge
    """Where backward begins: loss [] or output [s, b, h]."""
    loss: Tensor | None
    """Loss [] of the last stage, detached."""


class PlainWorker:
    """Runs whole chunks, one microbatch at a time."""

    def __init__(self, context: StepContext, is_training: bool = True) -> None:
        self.context, self.is_training = context, is_training
        self._held: dict[tuple[int, int], Held] = {}

    def streams(self) -> AbstractContextManager[None]:
        """Stay on the current stream."""
        return nullcontext()

    def forward(self, action: Action, received: Tensor | None) -> Tensor:
        """Run the forward on `received` [s, b, h] and keep what its backward needs."""
        key = (action.chunk, action.microbatch)
        assert key not in self._held, f"{action} runs twice"
        if received is not None:
            received.requires_grad_(self.is_training)
        output = forward_step(self.context, action.chunk, received)
        if self.is_training:
            loss = output.detach() if self.context.is_last(action.chunk) else None
            self._held[key] = Held(received, get_gradient_edge(output), loss)
        return output.detach()

    def backward(self, action: Action, grad: Tensor | None) -> Tensor | None:
        """Run the backward from `grad` [s, b, h] or from the kept loss."""
        key = (action.chunk, action.microbatch)
        assert key in self._held, f"{action} comes before its forward"
        held = self._held.pop(key)
        torch.autograd.backward([held.edge], [output_gradient(self.context, held.loss, grad)])
        return None if held.received is None else held.received.grad

    def overlap(self, action: Action, received: Tensor | None, grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Refuse `received` [s, b, h] and `grad` [s, b, h]: whole chunks hide nothing."""
        raise AssertionError(f"{action}: a pair needs chunks in stages")

    def weight_grads(self, action: Action) -> None:
        """Refuse: a backward of whole chunks puts nothing off."""
        raise AssertionError(f"{action}: weight gradients that come later need chunks in stages")

    def finish(self) -> None:
        """Check that no forward is left without its backward."""
        assert not self._held, f"forward without backward for (chunk, microbatch) {sorted(self._held)}"


class PlanRun:
    """One run of one list of actions."""

    def __init__(self, actions: Sequence[Action], context: StepContext, worker: Worker | None) -> None:
        backwards = [part for action in actions for part in action.parts if part.kind is ActionKind.BACKWARD]
        self._last_microbatch = {action.chunk: action.microbatch for action in backwards}
        self.actions, self.context = actions, context
        self.worker: Worker = PlainWorker(context, is_training=bool(backwards)) if worker is None else worker
        self.mailbox = Mailbox(context.pg_collection.pp, context.message_format)
        self._outgoing: dict[Key, Tensor] = {}
        """Made and not yet sent [s, b, h]."""

    def execute(self) -> list[Any]:
        """Run all actions; returns what the loss function reported, one entry per microbatch, [] without a loss."""
        with self.worker.streams():
            for are_messages, group in groupby(self.actions, key=lambda action: action.direction is not None):
                if are_messages:
                    self.mailbox.post(list(group), self._outgoing.pop)
                else:
                    for action in group:
                        with nullcontext() if self._is_last(action) else _no_sync(self.context, action.parts[-1].chunk):
                            self._run(action)
            self.worker.finish()
            self.mailbox.close()
        assert not self._outgoing, f"made and never sent: {[str(key) for key in self._outgoing]}"
        return self.context.reduced

    def _is_last(self, action: Action) -> bool:
        last = action.parts[-1]  # of a pair the backward, which is what makes gradients
        return self._last_microbatch.get(last.chunk, last.microbatch) == last.microbatch

    def _run(self, action: Action) -> None:
        if action.kind is ActionKind.FORWARD:
            self._put_output(action, self.worker.forward(action, self._take_input(action)))
        elif action.kind is ActionKind.BACKWARD:
            self._put_gradient(action, self.worker.backward(action, self._take_gradient(action)))
        elif action.kind is ActionKind.OVERLAP:
            first, second = action.parts
            received, grad = self._take_input(first), self._take_gradient(second)
            output, input_grad = self.worker.overlap(action, received, grad)
            self._put_output(first, output)
            self._put_gradient(second, input_grad)
        elif action.kind is ActionKind.WGRAD:
            self.worker.weight_grads(action)
        else:
            raise AssertionError(f"{action}: no worker does {action.kind}")

    def _take_input(self, action: Action) -> Tensor | None:
        if self.context.is_first(action.chunk):
            return None
        return self.mailbox.take((Direction.ACTIVATION, action.chunk, action.microbatch))

    def _take_gradient(self, action: Action) -> Tensor | None:
        if self.context.is_last(action.chunk):
            return None
        return self.mailbox.take((Direction.GRADIENT, action.chunk, action.microbatch))

    def _put_output(self, action: Action, output: Tensor) -> None:
        """Keep the output [s, b, h] for its SEND; the loss [] of the last stage goes nowhere."""
        if not self.context.is_last(action.chunk):
            self._outgoing[Direction.ACTIVATION, action.chunk, action.microbatch] = output

    def _put_gradient(self, action: Action, grad: Tensor | None) -> None:
        """Keep the gradient of the input [s, b, h] for its SEND."""
        if not self.context.is_first(action.chunk):
            assert grad is not None, f"{action}: no gradient of the input"
            self._outgoing[Direction.GRADIENT, action.chunk, action.microbatch] = grad


def execute(actions: Sequence[Action], context: StepContext, worker: Worker | None = None) -> list[Any]:
    """Run `actions` in order and return what the loss function reported for each microbatch."""
    return PlanRun(actions, context, worker).execute()


def _no_sync(context: StepContext, chunk: int) -> AbstractContextManager[Any]:
    """Return the context in which gradients only accumulate: the configured one, else the chunk's own if it has any."""
    configured = context.config.no_sync_func
    if configured is not None:
        return configured()
    own = getattr(context.chunks[chunk], "no_sync", None)
    return nullcontext() if own is None else own()
