"""The training log: a line every log interval and at the first iteration, scalars every TensorBoard interval.

Values that need a collective (router metrics, parameter norm, state hash) are computed on all ranks, and only for steps
that print or write something.
"""

from datetime import datetime
from typing import Any

import torch

from megatron.core.transformer.moe.moe_logging import get_moe_metrics
from megatron.core.utils.logging import emit, get_world_size
from megatron.training.callbacks.base import Callback
from megatron.training.flops import num_floating_point_operations
from megatron.training.global_vars import get_timers
from megatron.training.log_line import LogValues, format_log_line
from megatron.training.params_norm import params_norm
from megatron.training.state_hash import state_hash
from megatron.training.train_state import StepResult, TrainingRun
from megatron.training.training_log import IntervalSums
from megatron.training.writers import write_plain_scalars, write_scalars

LOG_RANK = -1
"""The last rank prints, because with pipeline stages only the last one knows the loss."""


class TrainingLog(Callback):
    """Prints log lines and writes scalars."""

    def __init__(self) -> None:
        self._sums = IntervalSums()
        self._is_first = True
        self._unreported_microbatches = 0

    def on_train_start(self, run: TrainingRun) -> None:
        get_timers()("interval-time", log_level=0).start(barrier=True)

    def on_evaluate_start(self, run: TrainingRun) -> None:
        if get_timers()("interval-time", log_level=0).is_running:
            get_timers()("interval-time").stop()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        args, iteration = run.args, run.state.iteration
        self._sums.add_step(result, result.batch_size * args.seq_length)
        self._unreported_microbatches += result.num_microbatches
        is_line = iteration % args.log_interval == 0 or self._is_first
        has_writer = bool(args.tensorboard_dir or args.wandb_project)
        is_scalar = has_writer and iteration % args.tensorboard_log_interval == 0
        if not (is_line or is_scalar):
            return
        moe = self._take_moe_metrics(run)
        norm = params_norm(run.model, run.pg_collection) if args.log_params_norm else None
        if is_scalar:
            self._write(run, result, moe, norm)
        if is_line:
            self._print(run, result, norm)
            self._is_first = False

    def _take_moe_metrics(self, run: TrainingRun) -> dict[str, float]:
        """Reduce what the routers collected since the last call and add it to the interval."""
        means = get_moe_metrics().reduce_and_reset(self._unreported_microbatches, run.pg_collection)
        self._sums.add_moe(means, self._unreported_microbatches)
        self._unreported_microbatches = 0
        return means

    def _print(self, run: TrainingRun, result: StepResult, norm: float | None) -> None:
        args, state, sums = run.args, run.state, self._sums
        is_reset = state.iteration % args.log_interval == 0
        seconds = get_timers()("interval-time").elapsed(reset=is_reset, barrier=True)
        per_step = seconds / sums.num_steps()
        operations = num_floating_point_operations(args, result.batch_size)
        throughput = operations / (per_step * 1e12 * get_world_size())
        moe = sums.mean_moe()
        values = LogValues(
            iteration=state.iteration,
            train_iters=args.train_iters,
            consumed_samples=state.consumed_train_samples,
            skipped_samples=state.skipped_train_samples,
            elapsed_ms_per_iteration=per_step * 1000.0,
            tflops_per_gpu=throughput if args.log_throughput else None,
            tokens_per_second=sums.num_tokens / seconds if args.log_throughput else None,
            learning_rate=learning_rate(run),
            global_batch_size=result.batch_size,
            losses=sums.mean_losses() | {key: value for key, value in moe.items() if is_loss(key)},
            moe_metrics={key: value for key, value in moe.items() if is_line_metric(key)},
            loss_scale=run.optimizer.get_loss_scale().item(),
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros_in_grad,
            params_norm=norm,
            num_skipped_iterations=sums.num_skipped,
            num_nan_iterations=sums.num_nan,
            state_hash=state_hash(run.model, run.optimizer) if args.log_state_hash else None,
        )
        emit(format_log_line(values, datetime.now()), rank=LOG_RANK)
        if args.log_timers_to_tensorboard and not self._is_first:
            write_plain_scalars({"iteration-time": per_step, "throughput": throughput}, state.iteration)
        if is_reset:
            self._sums = IntervalSums()
