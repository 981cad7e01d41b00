"""One training step: gradients of all microbatches, then the optimizer, then the schedule of the learning rate."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, tee
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.errors import DivergenceError
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.collectives import all_reduce, broadcast_object
from megatron.core.utils.groups import group_size
from megatron.training.train_state import StepResult, TrainingRun


def sum_losses(reports: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Add up the [loss sum, token count] pairs of microbatches.

    Shapes: per report and key [2] -> per key [2], float64.
    """
    totals: dict[str, torch.Tensor] = {}
    for report in reports:
        for key, pair in report.items():
            pair = pair.detach().reshape(2).to(torch.float64)
            totals[key] = totals[key] + pair if key in totals else pair
    return totals


def reduce_totals(totals: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum the pairs of this rank over the ranks of `group`, in one all-reduce: per key [2] -> [keys, 2]."""
    pairs = torch.stack(list(totals.values()))
    all_reduce(pairs, group)
    return pairs


def means_of(keys: Iterable[str], pairs: Iterable[Sequence[float]]) -> dict[str, float]:
    """Token-weighted mean per key from pairs on the host; 0 where no token counts."""
    return {key: total / count if count else 0.0 for key, (total, count) in zip(keys, pairs, strict=True)}


def mean_losses(totals: Mapping[str, torch.Tensor], groups: ProcessGroupCollection) -> dict[str, float]:
    """Turn the summed pairs of this rank into token-weighted means over the whole batch, known on every rank.

    Shapes: per key [2] -> a number per key.
    Host:   one all-reduce of all pairs together, then one read; with several stages a broadcast.
    """
    means = means_of(totals, reduce_totals(totals, groups.dp_cp).tolist()) if totals else {}
    return tell_all_stages(means, groups)


def tell_all_stages(means: dict[str, float], groups: ProcessGroupCollection) -> dict[str, float]:
    """The means of the last pipeline stage, which alone has losses."""
    return broadcast_object(means, groups.pp, group_src=group_size(groups.pp) - 1)


def chunk_iterators(iterator: Iterator[Any] | None, num_microbatches: int, num_chunks: int) -> list[Any]:
    """Iterators for the chunks of this rank, each over the same next `num_microbatches` batches.

    A chunk that needs no data leaves its iterator alone; batches are drawn when the first chunk asks for them.
    """
    if iterator is None or num_chunks == 1:
        return [iterator] * num_chunks
    return list(tee(islice(iterator, num_microbatches), num_chunks))


def refuse_non_finite(losses: Mapping[str, float], iteration: int) -> None:
    """Stop on a loss that is inf or nan, on all ranks alike, before the optimizer can spread it."""
    bad = {key: value for key, value in losses.items() if not isfinite(value)}
    if bad:
        raise DivergenceError(
            f"iteration {iteration}: {', '.join(f'{key}={value}' for key, value in bad.items())}: the loss must be "
            "finite; lower the learning rate or look at the data, or pass --no-check-for-nan-in-loss-and-grad."
        )


def accumulate_gradients(run: TrainingRun, data_iterator: Any, num_microbatches: int) -> dict[str, torch.Tensor]:
    """Forward and backward over all microbatches; the gradients of every rank are complete afterwards.

    Returns the summed pairs [2] of this rank. Host: no synchronisation, unless a module waits.
    """
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=run.forward_step_func,
        data_iterator=chunk_iterators(data_iterator, num_microbatches, len(run.model)),
        model=run.model,
        num_microbatches=num_microbatches,
        seq_length=run.args.seq_length,
        micro_batch_size=run.args.micro_batch_size,
        forward_only=False,
    )
    return sum_losses(reports)


def train_step(run: TrainingRun) -> StepResult:
    """Do one step and say how it went. Counters of `run.state` are left to the caller."""
    if run.guarded_steps is not None:
        return run.guarded_steps.train_step()
    args = run.args
    num_microbatches, batch_size = get_num_microbatches(), get_current_global_batch_size()
    totals = accumulate_gradients(run, run.train_iterator, num_microbatches)
    losses = mean_losses(totals, run.pg_collection)
    if args.check_for_nan_in_loss_and_grad:
        refuse_non_finite(losses, run.state.iteration + 1)
    if args.empty_unused_memory_level >= 1 and run.device.type == "cuda":
        torch.cuda.empty_cache()
    is_updated, grad_norm, num_zeros = run.optimizer.step()
    if is_updated:
        run.scheduler.step(increment=batch_size)
    if args.empty_unused_memory_level >= 2 and run.device.type == "cuda":
        torch.cuda.empty_cache()
    return StepResult(
        losses=losses,
        is_skipped=not is_updated,
        grad_norm=grad_norm,
        num_zeros_in_grad=num_zeros,
        num_microbatches=num_microbatches,
        batch_size=batch_size,
    )


def skip_step(run: TrainingRun) -> int:
    """Consume the data of one step without using it (--iterations-to-skip); returns the samples passed over."""
    run.put_off.do()
    if run.train_iterator is not None:
        for _ in range(get_num_microbatches()):
            next(run.train_iterator)
    return get_current_global_batch_size()
