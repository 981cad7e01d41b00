"""The plan of a model that is whole on each rank: F0 B0 F1 B1 ..., one microbatch in flight."""

from megatron.core.pipeline_parallel.actions import Action, PlanShape, backward, forward


def no_pipelining(shape: PlanShape) -> list[Action]:
    """List the forward, and in training the backward, of each microbatch in turn."""
    assert (shape.pp_size, shape.num_chunks) == (1, 1), f"no_pipelining runs one stage with one chunk, got {shape}"
    kinds = [forward] if shape.forward_only else [forward, backward]
    return [make(0, i) for i in range(shape.num_microbatches) for make in kinds]


def peak_in_flight(shape: PlanShape) -> int:
    """Microbatches whose activations are held at the same time."""
    return min(shape.num_microbatches, 1)
