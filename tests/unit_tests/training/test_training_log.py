"""Sums between log lines."""

import pytest

from megatron.training.train_state import StepResult
from megatron.training.training_log import IntervalSums


def step(loss, is_skipped=False):
    return StepResult(losses={"lm loss": loss}, is_skipped=is_skipped)


def test_losses_are_averaged_over_advanced_steps():
    sums = IntervalSums()
    for result in (step(4.0), step(float("nan"), is_skipped=True), step(2.0)):
        sums.add_step(result, num_tokens=10)
    assert sums.mean_losses() == {"lm loss": 3.0}
    assert (sums.num_advanced, sums.num_skipped, sums.num_nan, sums.num_tokens) == (2, 1, 1, 30)


def test_interval_of_skipped_steps_has_no_loss():
    sums = IntervalSums()
    sums.add_step(step(1.0, is_skipped=True), num_tokens=10)
    assert sums.mean_losses() == {}
    assert sums.num_nan == 0


def test_router_values_are_weighted_by_microbatches():
    sums = IntervalSums()
    sums.add_moe({"load_balancing_loss": 1.0}, num_microbatches=1)
    sums.add_moe({"load_balancing_loss": 2.0}, num_microbatches=3)
    assert sums.mean_moe() == pytest.approx({"load_balancing_loss": 1.75})
