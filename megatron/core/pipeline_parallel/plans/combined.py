"""Pairs of a forward and a backward that hide each other's communication.

    one stage              F0   F1|B0   F2|B1   ...   B of the last
    interleaved pipeline   warm-up and one forward more, then pairs, then the backwards that are left

With the forward more, the forward and the backward of a pair belong to different microbatches or chunks on every rank:
neither needs what the other makes.

Where weight gradients are delayed, each backward of a pipeline leaves those of its chunk's first layer to a W behind
it. The messages of the backward stand in between, so that the W hides them.
"""

from megatron.core.pipeline_parallel.actions import (
    Action,
    ActionKind,
    PlanShape,
    backward,
    forward,
    overlap,
    weight_grads,
)
from megatron.core.pipeline_parallel.plans.interleaved import interleaved_order, warmup_forwards


def combined_no_pipelining(shape: PlanShape) -> list[Action]:
    """List the actions of a model that is whole on each rank: each forward beside the backward before it."""
    assert (shape.pp_size, shape.num_chunks) == (1, 1), f"one stage with one chunk, got {shape}"
    last = shape.num_microbatches - 1
    pairs = [overlap(forward(0, i + 1), backward(0, i)) for i in range(last)]
    return [forward(0, 0), *pairs, backward(0, last)]


def no_pipelining_peak(shape: PlanShape) -> int:
    """Microbatches whose activations are held at the same time."""
    return min(shape.num_microbatches, 2)


def combined_interleaved(shape: PlanShape) -> list[Action]:
    """List the actions of one rank of an interleaved pipeline."""
    forwards, backwards = interleaved_order(shape)
    warmup = min(warmup_forwards(shape) + 1, len(forwards))
    pairs = [overlap(first, second) for first, second in zip(forwards[warmup:], backwards, strict=False)]
    work = [*forwards[:warmup], *pairs, *backwards[len(pairs) :]]
    return [part for action in work for part in _with_weight_grads(action)] if shape.delays_wgrad else work


def _with_weight_grads(action: Action) -> list[Action]:
    last = action.parts[-1]
    return [action, weight_grads(last.chunk, last.microbatch)] if last.kind is ActionKind.BACKWARD else [action]


def interleaved_peak(shape: PlanShape) -> int:
    """Microbatches times chunks whose activations one rank holds at the same time, at most."""
    return min(shape.num_microbatches * shape.num_chunks, warmup_forwards(shape) + 2)
