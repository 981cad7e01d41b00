"""Runs a plan, whatever schedule it came from.

Backward passes of a chunk reduce gradients only in the last one: every action of a chunk before its last backward runs
under `no_sync`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.step import StepContext, backward_step, forward_step


class Worker(Protocol):
    """Does the actions, and keeps what a forward leaves for its backward."""

    def streams(self) -> AbstractContextManager[None]:
        """The streams that the actions of a step run on."""
        ...

    def forward(self, action: Action) -> None:
        """Run the forward of a microbatch in a chunk."""
        ...

    def backward(self, action: Action) -> None:
        """Run its backward."""
        ...

    def overlap(self, action: Action) -> None:
        """Run a pair of both."""
        ...

    def finish(self) -> None:
        """Every forward that needed a backward had it."""
        ...


class PlainWorker:
    """Runs whole chunks, one microbatch at a time."""

    def __init__(self, context: StepContext, is_training: bool = True) -> None:
        self.context, self.is_training = context, is_training
        self._losses: dict[tuple[int, int], torch.Tensor] = {}

    def streams(self) -> AbstractContextManager[None]:
        """Stay on the current stream."""
        return nullcontext()

    def forward(self, action: Action) -> None:
        """Run the forward and keep its loss."""
        key = (action.chunk, action.microbatch)
        assert key not in self._losses, f"{action} runs twice"
        loss = forward_step(self.context, action.chunk)
        if self.is_training:
            self._losses[key] = loss

    def backward(self, action: Action) -> None:
        """Run the backward of the kept loss."""
        key = (action.chunk, action.microbatch)
        assert key in self._losses, f"{action} comes before its forward"
        backward_step(self.context, self._losses.pop(key))

    def overlap(self, action: Action) -> None:
        """Refuse: whole chunks hide nothing."""
        raise AssertionError(f"{action}: a pair needs chunks in stages")

    def finish(self) -> None:
        """Check that no forward is left without its backward."""
        assert not self._losses, f"forward without backward for (chunk, microbatch) {sorted(self._losses)}"


def execute(actions: Sequence[Action], context: StepContext, worker: Worker | None = None) -> list[Any]:
    """Run `actions` in order and return what the loss function reported for each microbatch."""
    parts = [(i, part) for i, action in enumerate(actions) for part in action.parts]
    last_backward = {part.chunk: i for i, part in parts if part.kind is ActionKind.BACKWARD}
    if worker is None:
        worker = PlainWorker(context, is_training=bool(last_backward))
    do = {
        ActionKind.FORWARD: worker.forward,
        ActionKind.BACKWARD: worker.backward,
        ActionKind.OVERLAP: worker.overlap,
    }
    with worker.streams():
        for i, action in enumerate(actions):
            chunk = action.parts[-1].chunk
            is_last = i >= last_backward.get(chunk, i)
            with nullcontext() if is_last else _no_sync(context, chunk):
                do[action.kind](action)
        worker.finish()
    return context.reduced


def _no_sync(context: StepContext, chunk: int) -> AbstractContextManager[Any]:
    """Return the context in which gradients only accumulate: the configured one, else the chunk's own if it has any."""
    configured = context.config.no_sync_func
    if configured is not None:
        return configured()
    own = getattr(context.chunks[chunk], "no_sync", None)
    return nullcontext() if own is None else own()
