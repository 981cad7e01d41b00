"""The training log: a line every log interval and at the first iteration, scalars every TensorBoard interval.

Values that need a collective (router figures, parameter norm, state hash) are computed on all ranks, and only for steps
that print or write something. Lines and scalars come from the last rank.
"""

import argparse
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron.core.optimizer.clip_grads import params_norm
from megatron.core.transformer.moe.moe_logging import LOSS_LABELS, MoEMetrics
from megatron.core.utils.logging import emit, get_rank, get_world_size
from megatron.training.callbacks.base import Callback
from megatron.training.evaluation import LOG_RANK
from megatron.training.flops import num_floating_point_operations
from megatron.training.global_vars import get_timers
from megatron.training.log_line import LogValues, format_log_line
from megatron.training.memory_estimate import MEBIBYTE
from megatron.training.model_setup import complete_parameters
from megatron.training.state_hash import state_hash
from megatron.training.train_state import StepResult, TrainingRun
from megatron.training.training_log import IntervalSums
from megatron.training.writers import write_plain_scalars, write_scalars

INTERVAL_TIMER = "interval-time"


class TrainingLog(Callback):
    """Prints log lines and writes scalars."""

    def __init__(self) -> None:
        self._sums = IntervalSums()
        self._is_first = True
        self._routers: MoEMetrics | None = None
        self._unreported_microbatches = 0

    def on_train_start(self, run: TrainingRun) -> None:
        get_timers()(INTERVAL_TIMER, log_level=0).start(barrier=True)

    def on_evaluate_start(self, run: TrainingRun) -> None:
        run.put_off.do()
        timer = get_timers()(INTERVAL_TIMER, log_level=0)
        if timer.is_running:
            timer.stop()

    def on_evaluate_end(self, run: TrainingRun) -> None:
        get_timers()(INTERVAL_TIMER, log_level=0).start(barrier=True)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        args, iteration = run.args, run.state.iteration
        self._sums.add_step(result, result.batch_size * args.seq_length)
        self._unreported_microbatches += result.num_microbatches
        is_line = iteration % args.log_interval == 0 or self._is_first
        has_writer = bool(args.tensorboard_dir or args.wandb_project)
        is_scalar = has_writer and iteration % args.tensorboard_log_interval == 0
        if not (is_line or is_scalar):
            return
        router_figures = self._take_router_figures(run, result)
        norm = None
        if args.log_params_norm:
            complete_parameters(run.model)
            parameters = (param for chunk in run.model for param in chunk.parameters())
            norm = float(params_norm(parameters, run.pg_collection, run.device))
        if is_scalar:
            _write_step(run, result, router_figures, norm)
        if is_line:
            self._end_interval(run, result, norm)
            if self._is_first and run.device.type == "cuda":
                emit(memory_report(run.device), rank=LOG_RANK)
            self._is_first = False

    def on_train_end(self, run: TrainingRun) -> None:
        run.put_off.do()
        if run.device.type == "cuda":
            emit(memory_report(run.device), rank=LOG_RANK)

    def _take_router_figures(self, run: TrainingRun, result: StepResult) -> dict[str, float]:
        """Means of what the routers collected since the last call; adds them to the interval and returns them."""
        if self._routers is None:
            self._routers = MoEMetrics(run.model)
        groups, count = run.pg_collection, self._unreported_microbatches
        if result.router_sums is None:
            means = self._routers.reduce_and_reset(count, groups)
        else:
            means = self._routers.reset_and_summarise(result.router_sums, count, groups)
        self._sums.add_moe(means, self._unreported_microbatches)
        self._unreported_microbatches = 0
        return means

    def _end_interval(self, run: TrainingRun, result: StepResult, norm: float | None) -> None:
        """Print the line of the interval; start a new interval unless this was only the first iteration.

        Only what must not wait is read here: beside captured steps the line is made while the device does the next one.
        """
        args, sums = run.args, self._sums
        is_reset = run.state.iteration % args.log_interval == 0
        timers = get_timers()
        seconds = timers(INTERVAL_TIMER).elapsed(reset=is_reset, barrier=True)
        seconds_per_step = seconds / sums.num_steps()
        read = ReadNow(
            elapsed_ms_per_iteration=seconds_per_step * 1000.0,
            loss_scale=run.optimizer.get_loss_scale().item(),
            params_norm=norm,
            state_hash=state_hash(run.model, run.optimizer) if args.log_state_hash else None,
            time=datetime.now(),
        )
        run.put_off.add(partial(_print_line, run, result, sums, read))
        others = [name for name in timers.names() if name != INTERVAL_TIMER]
        if run.guarded_steps is None or others or self._is_first:
            run.put_off.do()
        self._report_timers(run, result, others, seconds_per_step)
        if is_reset:
            self._sums = IntervalSums()

    def _report_timers(self, run: TrainingRun, result: StepResult, names: list[str], seconds_per_step: float) -> None:
        """Print the timers of these names, and write step time and throughput if asked for."""
        args, iteration = run.args, run.state.iteration
        if args.log_timers_to_tensorboard and not self._is_first:
            rate = throughput(args, result.batch_size, seconds_per_step)
            write_plain_scalars({"iteration-time": seconds_per_step, "throughput": rate}, iteration)
        text = get_timers().log_string(names, normalizer=self._sums.num_steps())
        if text is not None:
            emit(text, rank=LOG_RANK)


class ReadNow(NamedTuple):
    """What a log line holds of the end of its step; the rest stays as it is until the next one has ended."""

    elapsed_ms_per_iteration: float
    loss_scale: float
    params_norm: float | None
    state_hash: str | None
    time: datetime


def _print_line(run: TrainingRun, result: StepResult, sums: IntervalSums, read: ReadNow) -> None:
    """Print the line of an interval."""
    args, state = run.args, run.state
    seconds_per_step = read.elapsed_ms_per_iteration / 1000.0
    router_losses, router_metrics = split_router_figures(sums.mean_moe())
    values = LogValues(
        iteration=state.iteration,
        train_iters=args.train_iters,
        consumed_samples=state.consumed_train_samples,
        skipped_samples=state.skipped_train_samples,
        elapsed_ms_per_iteration=read.elapsed_ms_per_iteration,
        tflops_per_gpu=throughput(args, result.batch_size, seconds_per_step) if args.log_throughput else None,
        tokens_per_second=sums.num_tokens / sums.num_steps() / seconds_per_step if args.log_throughput else None,
        learning_rate=learning_rate(run.optimizer.param_groups),
        global_batch_size=result.batch_size,
        losses=sums.mean_losses() | router_losses,
        moe_metrics=router_metrics,
        loss_scale=read.loss_scale,
        grad_norm=result.grad_norm,
        num_zeros=result.num_zeros_in_grad,
        params_norm=read.params_norm,
        num_skipped_iterations=sums.num_skipped,
        num_nan_iterations=sums.num_nan,
        hidden_share=run.hidden_share,
        num_overflows=None if sums.row_load is None else sums.num_overflows,
        row_head_room=sums.row_head_room(args.moe_expert_rank_capacity_factor),
        state_hash=read.state_hash,
    )
    emit(format_log_line(values, read.time), rank=LOG_RANK)


def throughput(args: argparse.Namespace, batch_size: int, seconds_per_step: float) -> float:
    """TFLOP/s of one rank by Megatron's formula."""
    return num_floating_point_operations(args, batch_size) / (seconds_per_step * 1e12 * get_world_size())


def learning_rate(param_groups: list[dict[str, Any]]) -> float:
    """The rate of the groups that follow the common schedule; of any group if all are decoupled."""
    common = [group["lr"] for group in param_groups if not group["is_decoupled_lr"]]
    return (common or [group["lr"] for group in param_groups])[0]


def split_router_figures(figures: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Sort the routers' figures into losses and other values; those of single layers go to TensorBoard only."""
    whole = {key: value for key, value in figures.items() if not key.startswith("moe/")}
    losses = {key: value for key, value in whole.items() if key in LOSS_LABELS.values()}
    return losses, {key: value for key, value in whole.items() if key not in losses}


def _write_step(run: TrainingRun, result: StepResult, router_figures: Mapping[str, float], norm: float | None) -> None:
    """Write the scalars of one step under Megatron's keys."""
    args, state = run.args, run.state
    scalars: dict[str, float] = {
        "learning-rate": learning_rate(run.optimizer.param_groups),
        "batch-size": result.batch_size,
        **result.losses,
    }
    if args.log_loss_scale_to_tensorboard:
        scalars["loss-scale"] = run.optimizer.get_loss_scale().item()
    if args.log_world_size_to_tensorboard:
        scalars["world-size"] = get_world_size()
    optional = {"grad-norm": result.grad_norm, "num-zeros": result.num_zeros_in_grad, "params-norm": norm}
    scalars.update({key: value for key, value in optional.items() if value is not None})
    write_scalars(scalars, state.iteration, state.consumed_train_samples)
    plain = dict(router_figures)
    if state.skipped_train_samples:
        plain["skipped-train-samples"] = state.skipped_train_samples
    if args.log_memory_to_tensorboard and run.device.type == "cuda":
        plain.update(memory_scalars(run.device))
    write_plain_scalars(plain, state.iteration)


def memory_report(device: torch.device) -> str:
    """What the allocator holds: after the first step, to compare with the estimate printed at start, and at the end."""
    parts = ("allocated", torch.cuda.memory_allocated), ("max allocated", torch.cuda.max_memory_allocated)
    parts += ("reserved", torch.cuda.memory_reserved), ("max reserved", torch.cuda.max_memory_reserved)
    text = " | ".join(f"{name}: {read(device) / MEBIBYTE:.1f}" for name, read in parts)
    return f"[Rank {get_rank()}] memory (MB) | {text}"


def memory_scalars(device: torch.device) -> dict[str, float]:
    """Statistics of the device's allocator under Megatron's keys."""
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }
