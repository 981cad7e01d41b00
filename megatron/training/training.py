"""`pretrain`: from a command line to a trained model, and the loop itself.

parse arguments -> initialise -> build model, optimizer, data -> train -> evaluate -> leave
"""

import argparse
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core import graph_state
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.logging import get_logger, log_single_rank
from megatron.training.arguments import parse_args
from megatron.training.callbacks.base import Callback, CallbackList
from megatron.training.callbacks.checkpoint import PeriodicCheckpoint
from megatron.training.callbacks.evaluation import PeriodicEvaluation
from megatron.training.callbacks.exit import ExitConditions
from megatron.training.callbacks.gc import ManualGC
from megatron.training.callbacks.hidden_share import HiddenShare
from megatron.training.callbacks.metrics import TrainingLog
from megatron.training.callbacks.profiler import Profiler, is_profiled
from megatron.training.callbacks.progress import ProgressBar, is_terminal
from megatron.training.callbacks.stream_check import checked_streams
from megatron.training.checkpointing import CheckpointWriter, load_checkpoint
from megatron.training.data_loaders import build_train_valid_test_data_iterators
from megatron.training.evaluation import evaluate_and_print
from megatron.training.flops import num_floating_point_operations
from megatron.training.guarded_steps import build_guarded_steps
from megatron.training.heartbeat import Heartbeat, open_store
from megatron.training.initialize import initialize_megatron, shut_down
from megatron.training.memory_estimate import report_memory_estimate
from megatron.training.model_setup import build_model, build_optimizer, connect_schedule
from megatron.training.train_state import StepResult, TrainingRun
from megatron.training.train_step import skip_step, train_step
from megatron.training.writers import close_writers

logger = get_logger(__name__)


def pretrain(
    train_valid_test_dataset_provider: Callable[..., Any],
    model_provider: Callable[..., torch.nn.Module],
    model_type: ModelType,
    forward_step_func: Callable[..., Any],
    *,
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    argv: Sequence[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainingRun:
    """Run the program that the command line describes; returns the finished run.

    Args:
        train_valid_test_dataset_provider: maps [train, valid, test] sample counts to three datasets.
        model_provider: builds the module of this rank from `pre_process` and `post_process`.
        model_type: only `ModelType.encoder_or_decoder` exists.
        forward_step_func: maps (data iterator, model) to (output, loss function).
        extra_args_provider: adds flags to the parser.
        argv: words of the command line; None means those of the process.
        callbacks: run after the standard ones on every hook.
    """
    assert model_type == ModelType.encoder_or_decoder, f"model_type={model_type}: this tree trains decoders only"
    start_time = time.monotonic()
    args = parse_args(argv, extra_args_provider)
    device = initialize_megatron(args)
    heartbeat = Heartbeat(open_store(), collective_timeout_s=60.0 * args.distributed_timeout_minutes)
    try:
        with heartbeat.watch(), checked_streams(args) as stream_checks:
            run = build_run(args, device, model_provider, forward_step_func)
            restore_generators = load_checkpoint(run)
            build_data(run, train_valid_test_dataset_provider)
            restore_generators()
            run.guarded_steps = build_guarded_steps(run)
            run.callbacks = CallbackList([*stream_checks, *standard_callbacks(args, start_time, heartbeat), *callbacks])
            if not args.skip_train:
                train(run)
            if run.exit_reason is None:
                evaluate_at_end(run)
            if run.guarded_steps is not None:
                run.guarded_steps.close()
            log_single_rank(logger, logging.INFO, f"counters: {dict(run.counters)}")
    finally:
        graph_state.destroy_graphs()
        close_writers()
    shut_down()
    return run


def build_run(
    args: argparse.Namespace,
    device: torch.device,
    model_provider: Callable[..., torch.nn.Module],
    forward_step_func: Callable[..., Any],
) -> TrainingRun:
    """Build model, optimizer and schedule of this rank."""
    pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    report_memory_estimate(args)
    model = build_model(model_provider, args, device, pg_collection)
    optimizer, scheduler = build_optimizer(args, model, pg_collection)
    model_config = model[0].config
    counters: Counter[str] = Counter()
    connect_schedule(model_config, optimizer, counters)
    return TrainingRun(
        args=args,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        model_config=model_config,
        pg_collection=pg_collection,
        device=device,
        forward_step_func=forward_step_func,
        counters=counters,
    )


def build_data(run: TrainingRun, dataset_provider: Callable[..., Any]) -> None:
    """Build the iterators of this rank from the samples that the run has consumed so far."""
    run.train_iterator, run.valid_iterator, run.test_iterator = build_train_valid_test_data_iterators(
        dataset_provider, run.state.consumed_train_samples, run.state.consumed_valid_samples
    )


def standard_callbacks(args: argparse.Namespace, start_time: float, heartbeat: Heartbeat) -> list[Callback]:
    """What a run does beside its steps, in the order in which it happens after each of them."""
    callbacks: list[Callback] = [heartbeat, *([HiddenShare()] if args.log_overlap else []), TrainingLog()]
    if is_terminal():
        callbacks.append(ProgressBar())
    if args.eval_interval and args.eval_iters:
        callbacks.append(PeriodicEvaluation(args.eval_interval))
    callbacks.append(
        ExitConditions(
            exit_signal=args.exit_signal if args.exit_signal_handler else None,
            duration_minutes=args.exit_duration_in_mins,
            interval=args.exit_interval,
            start_time=start_time,
            report=heartbeat.report,
        )
    )
    if args.save is not None:
        callbacks.append(PeriodicCheckpoint(CheckpointWriter(args), args.save_interval))
    if args.manual_gc:
        callbacks.append(ManualGC(args.manual_gc_interval, around_evaluation=args.manual_gc_eval))
    if is_profiled(args):
        callbacks.append(Profiler(args))
    return callbacks


def train(run: TrainingRun) -> None:
    """Repeat steps until the last iteration, or until a callback asks to stop."""
    args, state, callbacks = run.args, run.state, run.callbacks
    callbacks.on_train_start(run)
    try:
        while state.iteration < args.train_iters and run.exit_reason is None:
            update_num_microbatches(state.consumed_train_samples)
            if state.iteration + 1 in args.iterations_to_skip:
                pass_over(run, skip_step(run))
                continue
            callbacks.on_step_start(run)
            result = train_step(run)
            advance(run, result)
            callbacks.on_step_end(run, result)
    finally:
        callbacks.on_train_end(run)
    if run.exit_reason is not None:
        log_single_rank(logger, logging.INFO, run.exit_reason)


def advance(run: TrainingRun, result: StepResult) -> None:
    """Count one step."""
    state = run.state
    state.iteration += 1
    state.consumed_train_samples += result.batch_size
    state.floating_point_operations_so_far += num_floating_point_operations(run.args, result.batch_size)
    run.counters["steps"] += 1
    run.counters["skipped steps"] += result.is_skipped


def pass_over(run: TrainingRun, num_samples: int) -> None:
    """Count an iteration whose data was consumed without a step."""
    run.state.iteration += 1
    run.state.consumed_train_samples += num_samples
    run.state.skipped_train_samples += num_samples
    run.counters["passed over"] += 1
    run.callbacks.on_step_passed_over(run)


def evaluate_at_end(run: TrainingRun) -> None:
    """Validation and test loss after the last iteration."""
    if not run.args.eval_iters:
        return
    where = f"iteration {run.state.iteration}"
    for iterator, name in ((run.valid_iterator, "validation"), (run.test_iterator, "test")):
        if iterator is not None:
            evaluate_and_print(run, iterator, f"{where} on {name} set")
