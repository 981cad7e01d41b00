"""Pairs of a forward and a backward that hide each other's communication: F0, F1|B0, F2|B1, ..., B of the last."""

from megatron.core.pipeline_parallel.actions import Action, PlanShape, backward, forward, overlap


def combined_no_pipelining(shape: PlanShape) -> list[Action]:
    """List the actions of a model that is whole on each rank: each forward beside the backward before it."""
    assert (shape.pp_size, shape.num_chunks) == (1, 1), f"one stage with one chunk, got {shape}"
    last = shape.num_microbatches - 1
    pairs = [overlap(forward(0, i + 1), backward(0, i)) for i in range(last)]
    return [forward(0, 0), *pairs, backward(0, last)]


def peak_in_flight(shape: PlanShape) -> int:
    """Microbatches whose activations are held at the same time."""
    return min(shape.num_microbatches, 2)
