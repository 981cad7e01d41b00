"""Interleaved 1F1B: a rank holds several chunks, so that the pipeline fills and drains in smaller steps.

Microbatches go through the chunks in groups: g of them through chunk 0, the same g through chunk 1, and so on.
Backwards go through the groups in the same order and through the chunks from the last to the first.

    p = 2, 2 chunks, g = 2     rank 0   F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 ...
                               rank 1        F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 ...
"""

from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel.actions import Action, PlanShape, backward, forward
from megatron.core.pipeline_parallel.plans.one_f_one_b import alternate


def interleaved(shape: PlanShape) -> list[Action]:
    """List the forwards and backwards of one rank."""
    forwards, backwards = interleaved_order(shape)
    return forwards if shape.forward_only else alternate(forwards, backwards, warmup_forwards(shape))


def peak_in_flight(shape: PlanShape) -> int:
    """Microbatches times chunks whose activations one rank holds at the same time, at most."""
    return min(shape.num_microbatches * shape.num_chunks, warmup_forwards(shape) + 1)


def interleaved_order(shape: PlanShape) -> tuple[list[Action], list[Action]]:
    """All forwards and all backwards, each in the order in which they run."""
    check_groups(shape)
    starts = range(0, shape.num_microbatches, shape.group_size)
    groups = [range(start, min(start + shape.group_size, shape.num_microbatches)) for start in starts]
    chunks = range(shape.num_chunks)
    forwards = [forward(chunk, i) for group in groups for chunk in chunks for i in group]
    backwards = [backward(chunk, i) for group in groups for chunk in reversed(chunks) for i in group]
    return forwards, backwards


def warmup_forwards(shape: PlanShape) -> int:
    """Forwards before the first backward: until the last chunk has its first input, and two for each later rank."""
    return 2 * (shape.pp_size - shape.pp_rank - 1) + (shape.num_chunks - 1) * shape.group_size


def check_groups(shape: PlanShape) -> None:
    """Refuse groups with which the stages would wait for each other.

    Raises: ConfigError that names a number of microbatches or a group size that works.
    """
    count, size, stages = shape.num_microbatches, shape.group_size, shape.pp_size
    if shape.forward_only:
        return
    if not stages <= size <= count:
        remedy = (
            f"use at least {max(size, stages)} microbatches (a larger --global-batch-size)"
            if size >= stages
            else f"set --microbatch-group-size-per-virtual-pipeline-stage to {stages} or more"
        )
        raise ConfigError(
            f"microbatch_group_size_per_vp_stage={size} with num_microbatches={count} and "
            f"pipeline_model_parallel_size={stages}: a group is not smaller than the pipeline and not larger than the "
            f"step; {remedy}."
        )
    rest = count % size
    if 0 < rest < stages:
        raise ConfigError(
            f"microbatch_group_size_per_vp_stage={size} with num_microbatches={count} and "
            f"pipeline_model_parallel_size={stages}: the last group has {rest} microbatches and the first stage would "
            f"wait for the last one; use {count - rest} or {count - rest + stages} microbatches, or "
            f"--microbatch-group-size-per-virtual-pipeline-stage {count}."
        )
