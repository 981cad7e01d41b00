"""Losses of microbatches and ranks become one mean; a loss that is not finite stops the run."""

import math

import pytest
import torch

from megatron.training.train_step import mean_losses, refuse_non_finite, sum_losses


def report(total, count):
    return {"lm loss": torch.tensor([total, count])}


def test_mean_is_weighted_by_tokens():
    totals = sum_losses([report(10.0, 5.0), report(2.0, 1.0)])
    assert mean_losses(totals, None) == {"lm loss": 2.0}


def test_batch_without_tokens_has_loss_zero():
    assert mean_losses(sum_losses([report(0.0, 0.0)]), None) == {"lm loss": 0.0}


def test_sums_keep_integers_above_fp32():
    totals = sum_losses([report(1.0, 2.0**24), report(1.0, 1.0)])
    assert totals["lm loss"].tolist() == [2.0, 2.0**24 + 1]


def mean_on_rank():
    import torch.distributed as dist

    rank = dist.get_rank()
    return mean_losses(sum_losses([report(6.0 * rank, 1.0 + rank)]), dist.group.WORLD)


def test_mean_is_over_all_ranks(pool):
    assert pool.run(mean_on_rank, world_size=2) == [{"lm loss": 2.0}] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_is_named_with_its_iteration(value):
    with pytest.raises(RuntimeError, match=rf"iteration 7: lm loss={value}: the loss must be finite"):
        refuse_non_finite({"lm loss": value, "other": 1.0}, 7)
    refuse_non_finite({"lm loss": 1.0}, 7)
