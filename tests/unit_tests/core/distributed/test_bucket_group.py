"""Transitions of a bucket."""

import pytest
import torch

from megatron.core.distributed.bucket_group import BucketGroup, BucketState
from megatron.core.distributed.grad_scaling import GradReduction
from megatron.core.utils.collectives import SUM


@pytest.fixture
def bucket():
    params = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("first", "second")}
    data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for i, param in enumerate(params.values()):
        param.main_grad = data[2 * i : 2 * i + 2]
    return BucketGroup(0, params, data, GradReduction(0.5, SUM), group=None)


def test_bucket_is_full_when_every_parameter_is_ready(bucket):
    bucket.mark_ready(bucket.params["second"])
    assert not bucket.is_full
    assert bucket.missing_names() == ["first"]
    bucket.mark_ready(bucket.params["first"])
    assert bucket.is_full
    assert bucket.missing_names() == []


def test_start_scales_and_finish_completes(bucket):
    bucket.start(async_op=True)
    assert bucket.grad_data.tolist() == [0.5, 1.0, 1.5, 2.0]
    assert bucket.state is BucketState.REDUCING
    bucket.finish()
    assert bucket.state is BucketState.REDUCED


def test_reset_opens_the_next_step(bucket):
    bucket.mark_ready(bucket.params["first"])
    bucket.start(async_op=False)
    bucket.finish()
    bucket.reset()
    assert bucket.state is BucketState.COLLECTING
    assert bucket.missing_names() == ["first", "second"]


def test_parameter_ready_twice_is_refused(bucket):
    bucket.mark_ready(bucket.params["first"])
    with pytest.raises(AssertionError, match="'first' was marked ready twice"):
        bucket.mark_ready(bucket.params["first"])


def test_second_start_is_refused(bucket):
    bucket.start(async_op=False)
    with pytest.raises(AssertionError, match="started while being reduced"):
        bucket.start(async_op=False)


def test_wait_before_start_is_refused(bucket):
    with pytest.raises(AssertionError, match="waited for while collecting"):
        bucket.finish()


def test_ready_after_start_is_refused(bucket):
    bucket.start(async_op=False)
    with pytest.raises(AssertionError, match="'second' was marked ready while being reduced"):
        bucket.mark_ready(bucket.params["second"])


def test_reset_while_reducing_is_refused(bucket):
    bucket.start(async_op=False)
    with pytest.raises(AssertionError, match="reset while being reduced"):
        bucket.reset()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_gradient_is_named(bucket, value):
    bucket.raise_if_not_finite()
    bucket.grad_data[3] = value
    with pytest.raises(RuntimeError, match=r"rank 0: .*gradient of second \(bucket 0"):
        bucket.raise_if_not_finite()
