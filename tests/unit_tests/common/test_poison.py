"""Poison of fresh memory."""

import pytest
import torch

from tests.common.poison import assert_finite, assert_in_range, fill_with_poison, fresh_memory_poison


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fresh_floats_are_nan(dtype):
    with fresh_memory_poison():
        x = torch.zeros(3, dtype=dtype)
        fresh = [torch.empty(3, dtype=dtype), torch.empty_like(x), x.new_empty(3), torch.empty_strided((3,), (1,))]
    assert all(torch.isnan(t).all() for t in fresh)


def test_fresh_integers_are_the_largest():
    with fresh_memory_poison():
        assert torch.empty(3, dtype=torch.int32).tolist() == [2**31 - 1] * 3


def test_settings_are_restored_after_an_error():
    before = torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="shape"), fresh_memory_poison():
        torch.zeros(3).view(2)
    assert torch.are_deterministic_algorithms_enabled() == before


def test_product_that_forgets_a_row_is_caught():
    with fresh_memory_poison():
        out = torch.empty(4, 2)
        torch.mm(torch.ones(3, 2), torch.ones(2, 2), out=out[:3])
    with pytest.raises(AssertionError, match=r"out \(4, 2\): 2 elements not finite, first at \[\[3, 0\], \[3, 1\]\]"):
        assert_finite("out", out)
    assert_finite("out", out[:3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_poison_of_a_storage_is_nan_in_every_float_format(dtype):
    x = torch.ones(4).to(dtype)
    fill_with_poison(x)
    assert torch.isnan(x.float()).all()


def test_poison_reaches_the_gradient_instead_of_a_version_error():
    x = torch.ones(3, requires_grad=True)
    kept = x * 2
    y = kept * kept
    fill_with_poison(kept.detach())
    y.sum().backward()
    assert torch.isnan(x.grad).all()


def test_value_outside_its_range_is_named():
    with pytest.raises(AssertionError, match=r"counts: 1 values outside 0 \.\. 8, first at \[\[1\]\]"):
        assert_in_range("counts", torch.tensor([3, -1]), 0, 8)
