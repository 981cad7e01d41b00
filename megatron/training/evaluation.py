"""Validation and test loss: the token-weighted mean over a number of batches.

The sums of loss and tokens are added over all batches, microbatches and ranks before the one division, so the value does
not depend on accumulation, on the number of ranks or on how a mask is spread over batches.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils.groups import group_size
from megatron.core.utils.logging import emit
from megatron.training.train_state import TrainingRun
from megatron.training.train_step import mean_losses, sum_losses
from megatron.training.writers import write_scalars

MAX_PPL_EXPONENT = 20
LOG_RANK = -1
"""The last rank prints, as in the training log."""


def evaluate(run: TrainingRun, data_iterator: Iterator[Any] | None, eval_iters: int) -> dict[str, float]:
    """Mean loss per key over `eval_iters` batches of the evaluation batch size; the model is left in training mode.

    Counts the samples in `run.state.consumed_valid_samples` only if the iterator is the validation iterator.
    """
    args = run.args
    batch_size = args.eval_global_batch_size
    micro_batch_size = args.eval_micro_batch_size
    num_microbatches = batch_size // (micro_batch_size * group_size(run.pg_collection.dp))
    _set_mode(run.model, training=False)
    totals: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for _ in range(eval_iters):
            reports = get_forward_backward_func()(
                forward_step_func=run.forward_step_func,
                data_iterator=data_iterator,
                model=run.model,
                num_microbatches=num_microbatches,
                seq_length=args.seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=True,
            )
            totals = sum_losses([totals, *reports])
            if data_iterator is run.valid_iterator:
                run.state.consumed_valid_samples += batch_size
    _set_mode(run.model, training=True)
    return mean_losses(totals, run.pg_collection.dp_cp)


def _set_mode(model: Sequence[torch.nn.Module], training: bool) -> None:
    for chunk in model:
        chunk.train(training)


def perplexity(loss: float) -> float:
    """exp(loss), with the exponent cut at 20 so that an untrained model prints a number."""
    return math.exp(min(MAX_PPL_EXPONENT, loss))


def format_evaluation(losses: dict[str, float], where: str) -> str:
    """The three lines of an evaluation: text between two rules that are one character longer."""
    text = f" validation loss at {where} | " + "".join(
        f"{key} value: {loss:.6E} | {key} PPL: {perplexity(loss):.6E} | " for key, loss in losses.items()
    )
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def evaluate_and_print(run: TrainingRun, data_iterator: Iterator[Any] | None, where: str) -> dict[str, float]:
    """Evaluate, print the block and write the scalars; returns the losses."""
    run.callbacks.on_evaluate_start(run)
    losses = evaluate(run, data_iterator, run.args.eval_iters)
    run.callbacks.on_evaluate_end(run)
    run.counters["evaluations"] += 1
    emit(format_evaluation(losses, where), rank=LOG_RANK)
    _write_scalars(run, losses)
    return losses


def _write_scalars(run: TrainingRun, losses: dict[str, float]) -> None:
    """TensorBoard and W&B keys of an evaluation."""
    scalars: dict[str, float] = {}
    for key, loss in losses.items():
        scalars[f"{key} validation"] = loss
        if run.args.log_validation_ppl_to_tensorboard:
            scalars[f"{key} validation ppl"] = perplexity(loss)
    write_scalars(scalars, run.state.iteration, run.state.consumed_train_samples)
