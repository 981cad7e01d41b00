"""Runs a plan, whatever schedule it came from.

Backward passes of a chunk reduce gradients only in the last one: every action of a chunk before its last backward runs
under `no_sync`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.step import StepContext, backward_step, forward_step


def execute(actions: Sequence[Action], context: StepContext) -> list[Any]:
    """Run `actions` in order and return what the loss function reported for each microbatch."""
    last_backward = {action.chunk: i for i, action in enumerate(actions) if action.kind is ActionKind.BACKWARD}
    losses: dict[tuple[int, int], torch.Tensor] = {}
    for i, action in enumerate(actions):
        key = (action.chunk, action.microbatch)
        is_last = i >= last_backward.get(action.chunk, i)
        with nullcontext() if is_last else _no_sync(context, action.chunk):
            if action.kind is ActionKind.FORWARD:
                assert key not in losses, f"{action} runs twice"
                loss = forward_step(context, action.chunk)
                if last_backward:
                    losses[key] = loss
            else:
                assert key in losses, f"{action} comes before its forward"
                backward_step(context, losses.pop(key))
    assert not losses, f"forward without backward for (chunk, microbatch) {sorted(losses)}"
    return context.reduced


def _no_sync(context: StepContext, chunk: int) -> AbstractContextManager[Any]:
    """Return the context in which gradients only accumulate: the configured one, else the chunk's own if it has any."""
    configured = context.config.no_sync_func
    if configured is not None:
        return configured()
    own = getattr(context.chunks[chunk], "no_sync", None)
    return nullcontext() if own is None else own()
