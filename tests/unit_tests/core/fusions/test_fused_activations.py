"""Activations and the end of a residual branch."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_bias_dropout import bias_dropout_add, get_bias_dropout_add
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from megatron.core.fusions.fused_bias_glu import bias_glu
from tests.common.small_models import normal


def test_bias_gelu_is_the_tanh_form():
    y = 1.5
    expected = y / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    assert bias_gelu(torch.tensor([1.0]).double(), torch.tensor([0.5]).double()).item() == pytest.approx(
        expected, 1e-12
    )


def test_swiglu_gates_with_the_first_half():
    # The gates are 1 and 2, the other halves 3 and 4.
    x, bias = torch.tensor([0.5, 1.5, 2.0, 3.0]).double(), torch.tensor([0.5, 0.5, 1.0, 1.0]).double()
    expected = torch.tensor([2.1931757, 7.0463766]).double()
    torch.testing.assert_close(bias_glu(x, bias, F.silu), expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(bias_glu(x + bias, None, F.silu), expected, rtol=1e-7, atol=0)


def test_residual_keeps_its_precision():
    x, residual = torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 2.0**-12)
    assert torch.equal(bias_dropout_add(x, None, residual, 0.0, True), torch.full((4,), 1.0 + 2.0**-12))


def test_dropout_spares_the_residual_and_hits_the_bias():
    torch.manual_seed(0)
    x, bias, residual = torch.ones(1000), torch.ones(1), torch.full((1000,), 5.0)
    got = bias_dropout_add(x, bias, residual, 0.5, True)
    assert set(got.tolist()) == {5.0, 9.0}


def test_evaluation_does_not_drop():
    x = normal(8)
    assert torch.equal(get_bias_dropout_add(False, True)((x, None), x, 0.9), x + x)
