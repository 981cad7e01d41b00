"""Kernels run on a CPU where the fixture calls them, and nowhere else."""

import os

import pytest
import torch

from megatron.core.optional_deps import tl, triton_jit
from tests.common.interpreted import ENVIRONMENT


@triton_jit
def _double(source, target, n: tl.constexpr):
    """Target [n] = 2 * source [n]."""
    places = tl.arange(0, n)
    tl.store(target + places, 2 * tl.load(source + places))


def double_job(x):
    result = torch.empty_like(x)
    _double[(1,)](x, result, x.numel())
    return result, {name: os.environ.get(name) for name in ENVIRONMENT}


def test_kernel_is_interpreted_in_the_other_process(interpreted):
    x = torch.arange(8.0)
    result, environment = interpreted(double_job, x)
    assert result.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    assert environment == ENVIRONMENT


def test_this_process_does_not_interpret(interpreted):
    interpreted(double_job, torch.zeros(8))
    assert not set(ENVIRONMENT) & set(os.environ)


def test_failure_is_reported_with_its_traceback(interpreted):
    with pytest.raises(AssertionError, match="double_job"):
        interpreted(double_job, "not a tensor")
