"""What happens to gradients between the last backward and the optimizer.

Steps:
    1. finish the reductions over data parallel ranks, dense and expert;
    2. sum the gradients that tensor-parallel ranks have in parts: norms and biases on sequence shards, routers, the
       gate of shared experts, norms of single heads;
    3. sum the step counts of all modules in one all-reduce and hand them back (expert bias);
    4. sum the gradient of an embedding that is also the output matrix over the first and the last pipeline stage;
    5. take the maximum of what modules saw in this step, in one all-reduce (FP8 amaxes);
    6. per-token loss: divide by the number of tokens of the global batch.
"""

from collections.abc import Sequence

import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import get_main_grad
from megatron.core.fp8.layer_state import Fp8LayerState
from megatron.core.param_attrs import is_shared_embedding, needs_sum_over_tp
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.collectives import MAX, all_reduce
from megatron.core.utils.groups import group_size


def finalize_model_grads(
    model_chunks: Sequence[DistributedDataParallel],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Complete the gradients of one step; every rank calls it once per step.

    `num_tokens` [] or [1] holds the unmasked tokens of the step that this rank counted (the last pipeline stage counts
    them, others have none) and is given with a per-token loss only.
    """
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    # Step 1
    for chunk in model_chunks:
        chunk.finish_grad_sync()
    # Step 2
    sum_partial_gradients(model_chunks, groups)
    # Step 3
    apply_step_counts(model_chunks, groups)
    # Step 4
    sum_shared_embedding(model_chunks, groups)
    # Step 5
    apply_step_amaxes(model_chunks, groups)
    # Step 6
    if num_tokens is not None:
        scale_by_token_count(model_chunks, num_tokens, groups)


def sum_partial_gradients(model_chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Sum the main gradients marked in `param_attrs` over tensor-parallel ranks, with one all-reduce for each dtype."""
    if group_size(groups.tp) == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for chunk in model_chunks:
        for param in chunk.parameters():
            if param.requires_grad and needs_sum_over_tp(param):
                grad = get_main_grad(param)
                by_dtype.setdefault(grad.dtype, []).append(grad)
    for dtype in sorted(by_dtype, key=str):
        grads = by_dtype[dtype]
        flat = torch.cat([grad.flatten() for grad in grads])
        all_reduce(flat, groups.tp)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))


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


def sum_shared_embedding(model_chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Sum the main gradients of the two copies of a shared embedding; other ranks do nothing.

    Both copies have a bucket of their own, so that a sharded optimizer cuts them at the same places.
    """
    for chunk in model_chunks:
        for param in chunk.parameters():
            if param.requires_grad and is_shared_embedding(param):
                all_reduce(get_main_grad(param), groups.embd)


def apply_step_amaxes(model_chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Take the maximum of the modules' amaxes over all ranks of the stage, with one all-reduce.

    The layers of FP8 recipes with a history take part.
    """
    modules = [module for chunk in model_chunks for module in chunk.modules() if isinstance(module, Fp8LayerState)]
    seen = [(module, amaxes) for module in modules if (amaxes := module.step_amaxes()) is not None]
    if not seen:
        return
    largest = torch.stack([amaxes for _, amaxes in seen])
    all_reduce(largest, groups.tp_dp_cp, MAX)
    for (module, _), amaxes in zip(seen, largest, strict=True):
        module.apply_step_amaxes(amaxes)


def scale_by_token_count(
    model_chunks: Sequence[DistributedDataParallel], num_tokens: torch.Tensor, groups: ProcessGroupCollection
) -> None:
    """Divide all gradients by the global token count, at least 1; the count stays on the device."""
    total = num_tokens.detach().clone()
    all_reduce(total, groups.pp)
    all_reduce(total, groups.dp_cp)
    factor = total.clamp(min=1).to(torch.float64).reciprocal().squeeze()
    for chunk in model_chunks:
        chunk.scale_gradients(factor)
