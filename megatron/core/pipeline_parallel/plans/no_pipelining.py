"""The plan of a model that is whole on each rank: F0 B0 F1 B1 ..., one microbatch in flight."""

from megatron.core.pipeline_parallel.actions import Action, ActionKind, PlanShape


def no_pipelining(shape: PlanShape) -> list[Action]:
    """List the forward, and in training the backward, of each microbatch in turn."""
    assert (shape.pp_size, shape.num_chunks) == (1, 1), f"no_pipelining runs one stage with one chunk, got {shape}"
    kinds = [ActionKind.FORWARD] if shape.forward_only else [ActionKind.FORWARD, ActionKind.BACKWARD]
    return [Action(kind, chunk=0, microbatch=i) for i in range(shape.num_microbatches) for kind in kinds]
