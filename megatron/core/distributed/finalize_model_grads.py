"""What happens to gradients between the last backward and the optimizer.

Steps:
    1. finish the reductions over data parallel ranks, dense and expert;
    2. sum the step counts of all modules in one all-reduce and hand them back (expert bias);
    3. per-token loss: divide by the number of tokens of the global batch.
"""

from collections.abc import Sequence

import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.collectives import all_reduce


def finalize_model_grads(
    model_chunks: Sequence[DistributedDataParallel],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Complete the gradients of one step; every rank calls it once per step.

    `num_tokens` [] or [1] holds this rank's unmasked tokens of the step and is given with a per-token loss only.
    """
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    # Step 1
    for chunk in model_chunks:
        chunk.finish_grad_sync()
    # Step 2
    apply_step_counts(model_chunks, groups)
    # Step 3
    if num_tokens is not None:
        scale_by_token_count(model_chunks, num_tokens, groups)


def apply_step_counts(model_chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Sum what modules counted in this step over all ranks of the stage, with one all-reduce.

    A module takes part if its `step_counts()` returns an int64 tensor [n]; `apply_step_counts` of the module gets the
    sum, of the same shape.
    """
    counted = []
    for chunk in model_chunks:
        for module in chunk.modules():
            step_counts = getattr(module, "step_counts", None)
            counts = step_counts() if step_counts is not None else None
            if counts is not None:
                counted.append((module, counts))
    if not counted:
        return
    summed = torch.cat([counts for _, counts in counted])
    all_reduce(summed, groups.tp_dp_cp)
    slices = torch.split(summed, [counts.numel() for _, counts in counted])
    for (module, _), total in zip(counted, slices, strict=True):
        module.apply_step_counts(total)


def scale_by_token_count(
    model_chunks: Sequence[DistributedDataParallel], num_tokens: torch.Tensor, groups: ProcessGroupCollection
) -> None:
    """Divide all gradients by the global token count, at least 1; the count stays on the device."""
    total = num_tokens.detach().clone()
    all_reduce(total, groups.dp_cp)
    factor = total.clamp(min=1).to(torch.float64).reciprocal().squeeze()
    for chunk in model_chunks:
        chunk.scale_gradients(factor)
