"""Losses of microbatches and ranks become one mean; a loss that is not finite stops the run."""

import math

import pytest
import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.train_step import chunk_iterators, mean_losses, refuse_non_finite, sum_losses


def report(total, count):
    return {"lm loss": torch.tensor([total, count])}


def test_mean_is_weighted_by_tokens():
    totals = sum_losses([report(10.0, 5.0), report(2.0, 1.0)])
    assert mean_losses(totals, ProcessGroupCollection()) == {"lm loss": 2.0}


def test_batch_without_tokens_has_loss_zero():
    assert mean_losses(sum_losses([report(0.0, 0.0)]), ProcessGroupCollection()) == {"lm loss": 0.0}


def test_sums_keep_integers_above_fp32():
    totals = sum_losses([report(1.0, 2.0**24), report(1.0, 1.0)])
    assert totals["lm loss"].tolist() == [2.0, 2.0**24 + 1]


def mean_on_rank():
    import torch.distributed as dist

    rank = dist.get_rank()
    return mean_losses(sum_losses([report(6.0 * rank, 1.0 + rank)]), ProcessGroupCollection(dp_cp=dist.group.WORLD))


def known_on_stages():
    import torch.distributed as dist

    totals = sum_losses([report(6.0, 2.0)]) if dist.get_rank() == 1 else {}
    return mean_losses(totals, ProcessGroupCollection(pp=dist.group.WORLD))


def test_every_stage_knows_the_losses_of_the_last(pool):
    assert pool.run(known_on_stages, world_size=2) == [{"lm loss": 3.0}] * 2


def test_chunks_see_the_same_batches_and_draw_them_once():
    data = iter(range(10))
    first, second, idle = chunk_iterators(data, 2, 3)
    assert [next(first), next(second), next(second), next(first)] == [0, 0, 1, 1]
    assert next(first, None) is None
    assert (next(data), next(idle)) == (2, 0)
    assert chunk_iterators(None, 2, 2) == [None, None]


def test_mean_is_over_all_ranks(pool):
    assert pool.run(mean_on_rank, world_size=2) == [{"lm loss": 2.0}] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_is_named_with_its_iteration(value):
    with pytest.raises(RuntimeError, match=rf"iteration 7: lm loss={value}: the loss must be finite"):
        refuse_non_finite({"lm loss": value, "other": 1.0}, 7)
    refuse_non_finite({"lm loss": 1.0}, 7)
