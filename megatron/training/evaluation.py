"""Validation and test loss: the token-weighted mean over a number of batches, or over a whole set.

The sums of loss and tokens are added over all batches, microbatches and ranks before the one division, so the value
does not depend on accumulation, on the number of ranks or on how a mask is spread over batches.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils.groups import group_size
from megatron.core.utils.logging import emit
from megatron.training.data_loaders import WholeSet
from megatron.training.train_state import TrainingRun
from megatron.training.train_step import chunk_iterators, mean_losses, sum_losses
from megatron.training.writers import write_scalars

MAX_PPL_EXPONENT = 20
LOG_RANK = -1
"""The last rank prints, as in the training log."""


def evaluate(run: TrainingRun, data_iterator: Iterator[Any] | None, eval_iters: int) -> dict[str, float]:
    """Mean loss per key over `eval_iters` batches of the evaluation batch size; the model is left in training mode.

    A whole set (--full-validation) is passed through once, sample by sample, whatever `eval_iters` is.
    """
    args = run.args
    num_microbatches = args.eval_global_batch_size // (args.eval_micro_batch_size * group_size(run.pg_collection.dp))
    micro_batch_size = args.eval_micro_batch_size
    if isinstance(data_iterator, WholeSet):
        eval_iters, num_microbatches, micro_batch_size = 1, data_iterator.num_batches, 1
    _set_mode(run.model, training=False)
    totals: dict[str, torch.Tensor] = {}
    for _ in range(eval_iters):
        if run.guarded_steps is not None:
            batch_totals = run.guarded_steps.evaluate(data_iterator, num_microbatches, micro_batch_size)
        else:
            batch_totals = forward_losses(run, data_iterator, num_microbatches, micro_batch_size)
        totals = sum_losses([totals, batch_totals])
    _set_mode(run.model, training=True)
    return mean_losses(totals, run.pg_collection)


def forward_losses(
    run: TrainingRun, data_iterator: Any, num_microbatches: int, micro_batch_size: int
) -> dict[str, torch.Tensor]:
    """Forward over one batch; returns the summed pairs [2] of this rank."""
    reports = get_forward_backward_func()(
        forward_step_func=run.forward_step_func,
        data_iterator=chunk_iterators(data_iterator, num_microbatches, len(run.model)),
        model=run.model,
        num_microbatches=num_microbatches,
        seq_length=run.args.seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=True,
    )
    return sum_losses(reports)


def _set_mode(model: Sequence[torch.nn.Module], training: bool) -> None:
    for chunk in model:
        chunk.train(training)


def perplexity(loss: float) -> float:
    """exp(loss), with the exponent cut at 20 so that an untrained model prints a number."""
    return math.exp(min(MAX_PPL_EXPONENT, loss))


def format_evaluation(losses: dict[str, float], where: str, suffix: str = "") -> str:
    """The three lines of an evaluation: text between two rules that are one character longer."""
    text = f" validation{suffix} loss at {where} | " + "".join(
        f"{key} value: {loss:.6E} | {key} PPL: {perplexity(loss):.6E} | " for key, loss in losses.items()
    )
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def evaluate_and_print(run: TrainingRun, data: Any, where: str) -> None:
    """Evaluate, print the block and write the scalars.

    `data` is an iterator, or a list of them with several validation sets; each set is reported with its index.
    """
    run.callbacks.on_evaluate_start(run)
    iterators = data if isinstance(data, list) else [data]
    for index, iterator in enumerate(iterators):
        suffix = f"-{index}" if isinstance(data, list) else ""
        losses = evaluate(run, iterator, run.args.eval_iters)
        emit(format_evaluation(losses, where, suffix), rank=LOG_RANK)
        _write_scalars(run, losses, suffix)
    if data is run.valid_iterator and not run.args.full_validation:
        # Every set has moved on by the same number of samples, so one counter serves all. Whole sets begin anew.
        run.state.consumed_valid_samples += run.args.eval_iters * run.args.eval_global_batch_size
    run.counters["evaluations"] += len(iterators)
    run.callbacks.on_evaluate_end(run)


def _write_scalars(run: TrainingRun, losses: dict[str, float], suffix: str) -> None:
    """TensorBoard and W&B keys of an evaluation."""
    scalars: dict[str, float] = {}
    for key, loss in losses.items():
        scalars[f"{key} validation{suffix}"] = loss
        if run.args.log_validation_ppl_to_tensorboard:
            scalars[f"{key} validation{suffix} ppl"] = perplexity(loss)
    write_scalars(scalars, run.state.iteration, run.state.consumed_train_samples)
