"""Builds what a step needs: the wrapped model, the optimizer and the schedule of its learning rate."""

import argparse
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.extensions.transformer_engine.optimizer import EngineAdam
from megatron.core.optimizer import OptimizerParamScheduler, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.collectives import barrier
from megatron.core.utils.groups import group_rank, group_size
from megatron.training.arguments import ddp_config_from_args, optimizer_config_from_args


def build_model(
    model_provider: Callable[..., torch.nn.Module],
    args: argparse.Namespace,
    device: torch.device,
    pg_collection: ProcessGroupCollection,
) -> list[torch.nn.Module]:
    """Build the model chunks of this rank, move them to the device and wrap them for data parallelism.

    Weights are drawn on the CPU by global name before the move, so all ranks of a data-parallel group start equal and
    nothing has to be broadcast.
    """
    if args.pipeline_model_parallel_size > 1:
        barrier(pg_collection.pp)  # a batch of messages must not be what opens the communicator of the group
    modules = build_chunks(model_provider, args.virtual_pipeline_model_parallel_size or 1, pg_collection)
    return [
        DistributedDataParallel(
            config=module.config,  # type: ignore[arg-type]
            ddp_config=ddp_config_from_args(args),
            module=module.to(device),
            pg_collection=pg_collection,
        )
        for module in modules
    ]


def build_chunks(
    model_provider: Callable[..., torch.nn.Module], num_chunks: int, pg_collection: ProcessGroupCollection
) -> list[torch.nn.Module]:
    """Build the chunks of this pipeline rank, first to last; only a provider of several is asked for `vp_stage`."""
    ranks, rank = group_size(pg_collection.pp), group_rank(pg_collection.pp)
    chunks = []
    for chunk in range(num_chunks):
        stage = chunk * ranks + rank
        ends = {"pre_process": stage == 0, "post_process": stage == ranks * num_chunks - 1}
        chunks.append(model_provider(**ends) if num_chunks == 1 else model_provider(**ends, vp_stage=chunk))
    return chunks


def complete_parameters(model: Sequence[torch.nn.Module]) -> None:
    """Wait for parameters that a sharded optimizer has sent on their way, before they are read outside forward."""
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_param_sync()


def connect_schedule(config: Any, optimizer: Any, counters: Counter[str]) -> None:
    """Give the schedule its hooks: scale the loss before backward, complete the gradients after the last microbatch.

    What a schedule did is added to `counters`.
    """
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.count_func = counters.update


def build_optimizer(
    args: argparse.Namespace, model: list[torch.nn.Module], pg_collection: ProcessGroupCollection
) -> tuple[Any, OptimizerParamScheduler]:
    """Build the optimizer for all chunks and the schedule that drives its learning rate and weight decay."""
    config = optimizer_config_from_args(args)
    extra: dict[str, Any] = {}
    if args.transformer_impl == "transformer_engine":
        moments = config.moment_dtype("exp_avg", torch.float32), config.moment_dtype("exp_avg_sq", torch.float32)
        extra["build_adam"] = functools.partial(EngineAdam, moment_dtypes=moments)
    optimizer = get_megatron_optimizer(config, model, pg_collection=pg_collection, **extra)
    return optimizer, build_scheduler(args, optimizer)


def build_scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """Turn the iterations or samples of the command line into a schedule that counts samples.

    A run that only evaluates may have no length; its schedule is never stepped and fits any checkpoint.
    """
    if args.train_samples:
        unit, total, decay = 1, args.train_samples, args.lr_decay_samples
        warmup, anneal = args.lr_warmup_samples, args.lr_wsd_decay_samples
    else:
        unit, total, decay = args.global_batch_size, args.train_iters, args.lr_decay_iters
        warmup, anneal = args.lr_warmup_iters, args.lr_wsd_decay_iters
    if args.skip_train:
        total = total or 1
    assert total, f"train_iters={args.train_iters}, train_samples={args.train_samples}: a schedule needs a length"
    decay_steps = (decay or total) * unit
    if args.lr_warmup_fraction is not None:
        warmup_steps = args.lr_warmup_fraction * decay_steps
    else:
        warmup_steps = warmup * unit
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=total * unit,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler
        or (args.skip_train and not args.use_checkpoint_opt_param_scheduler),
        wsd_decay_steps=None if anneal is None else anneal * unit,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
