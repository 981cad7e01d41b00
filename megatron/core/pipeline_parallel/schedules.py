"""Entry to the schedules: picks a plan, runs it, finalises the gradients."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from megatron.core.errors import ConfigError
from megatron.core.fp8.layer_state import forget_weight_codes
from megatron.core.pipeline_parallel.actions import PlanShape
from megatron.core.pipeline_parallel.executor import execute
from megatron.core.pipeline_parallel.overlap.worker import OverlapWorker
from megatron.core.pipeline_parallel.p2p import MessageFormat
from megatron.core.pipeline_parallel.plans import build_plan
from megatron.core.pipeline_parallel.step import ForwardStepFunc, StepContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.device import resolve_device
from megatron.core.utils.groups import group_rank, group_size


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """Return the function that runs all microbatches of a step; the schedule is chosen when it is called."""
    return run_schedule


def run_schedule(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: Any,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[Any]:
    """Run forward, and unless `forward_only` backward and gradient finalisation, of `num_microbatches` microbatches.

    `forward_step_func(data_iterator, model)` returns (output, loss_func); `loss_func(output)` returns (loss sum [],
    number of tokens [], report) or (mean loss [], report). The result lists the reports in microbatch order.
    With several stages they come from the last one only, elsewhere the list is empty.
    `seq_length` (or `decoder_seq_length`) and `micro_batch_size` size the messages between pipeline stages;
    `first_val_step` concerns low-precision weight caches, nothing reads it in high precision.
    """
    if adjust_tensor_shapes_fn is not None or p2p_communicator is not None:
        raise ConfigError(
            f"adjust_tensor_shapes_fn={adjust_tensor_shapes_fn} with p2p_communicator={p2p_communicator}: all messages "
            "between stages are alike and sent by pipeline_parallel/p2p; leave both out."
        )
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches={num_microbatches}: a step has at least one; check the batch sizes.")
    chunks = _as_list(model)
    forget_weight_codes(chunks)
    config: Any = chunks[0].config
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    shape = PlanShape(
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        num_chunks=len(chunks),
        pp_size=group_size(groups.pp),
        pp_rank=group_rank(groups.pp),
        microbatch_group_size=config.microbatch_group_size_per_vp_stage,
        delays_wgrad=config.delay_wgrad_compute,
    )
    context = StepContext(
        forward_step_func=forward_step_func,
        data_iterators=_as_iterators(data_iterator, len(chunks)),
        chunks=chunks,
        config=config,
        num_microbatches=num_microbatches,
        pg_collection=groups,
        shape=shape,
        message_format=message_format(config, groups, decoder_seq_length or seq_length, micro_batch_size),
        collect_non_loss_data=collect_non_loss_data,
    )
    with torch.no_grad() if forward_only else nullcontext():
        if config.overlap_moe_expert_parallel_comm and not (forward_only or collect_non_loss_data):
            reports = execute(build_plan(f"{plan_name(shape)}_overlap", shape), context, OverlapWorker(context))
        else:
            reports = execute(build_plan(plan_name(shape), shape), context)
    if not forward_only:
        _finalize(context)
    return reports


def plan_name(shape: PlanShape) -> str:
    """Choose the schedule for a layout."""
    if shape.num_chunks > 1 and shape.pp_size == 1:
        raise ConfigError(
            f"pipeline_model_parallel_size=1 with {shape.num_chunks} model chunks: chunks interleave over at least 2 "
            "stages; raise --pipeline-model-parallel-size or build one chunk."
        )
    if shape.num_chunks > 1:
        return "interleaved"
    return "1f1b" if shape.pp_size > 1 else "no_pipelining"


def message_format(
    config: Any, groups: ProcessGroupCollection, seq_length: int | None, micro_batch_size: int | None
) -> MessageFormat | None:
    """What stages send each other: [s, b, h] with the part of the sequence that a rank has between the layers."""
    if group_size(groups.pp) == 1:
        return None
    if seq_length is None or micro_batch_size is None:
        raise ConfigError(
            f"seq_length={seq_length} with micro_batch_size={micro_batch_size}: messages between pipeline stages have "
            "this size; pass both to the schedule."
        )
    parts = group_size(groups.cp) * (group_size(groups.tp) if config.sequence_parallel else 1)
    return MessageFormat(
        shape=(seq_length // parts, micro_batch_size, config.hidden_size),
        dtype=config.pipeline_dtype,
        device=resolve_device(config.device),
        is_overlapped=config.overlap_p2p_comm,
        is_batched=config.batch_p2p_comm,
    )


def _finalize(context: StepContext) -> None:
    """Hand the chunks, and with a per-token loss the token count, to the configured finaliser."""
    config = context.config
    has_loss = context.is_last(len(context.chunks) - 1)
    if config.calculate_per_token_loss and has_loss and context.num_tokens is None:
        raise ConfigError(
            "calculate_per_token_loss=True with a loss function that returns 2 values: the number of tokens is the "
            "divisor; return (loss sum, number of tokens, report)."
        )
    if config.finalize_model_grads_func is not None:
        num_tokens = context.num_tokens if config.calculate_per_token_loss else None
        if config.calculate_per_token_loss and not has_loss:
            num_tokens = torch.zeros((), dtype=torch.int64, device=resolve_device(config.device))
        config.finalize_model_grads_func(context.chunks, num_tokens)


def _as_list(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def _as_iterators(data_iterator: Any, num_chunks: int) -> list[Any]:
    """One iterator per chunk; a single one, or None on a rank without data, serves all."""
    if isinstance(data_iterator, list | tuple):
        assert len(data_iterator) == num_chunks, f"{len(data_iterator)} data iterators for {num_chunks} model chunks"
        return list(data_iterator)
    return [data_iterator] * num_chunks
