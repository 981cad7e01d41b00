"""Norms against their formulas."""

import pytest
import torch

from megatron.core.fusions.fused_norm import layer_norm, rms_norm
from tests.common.small_models import normal

X, W, B = normal(3, 5, seed=1), normal(5, seed=2), normal(5, seed=3)


@pytest.mark.parametrize("gamma_offset", [0.0, 1.0])
def test_rms_norm_formula(gamma_offset):
    expected = X / torch.sqrt((X**2).sum(-1, keepdim=True) / 5 + 0.1) * (W + gamma_offset)
    torch.testing.assert_close(rms_norm(X, W, 0.1, zero_centered=gamma_offset > 0), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gamma_offset", [0.0, 1.0])
def test_layer_norm_formula(gamma_offset):
    centred = X - X.sum(-1, keepdim=True) / 5
    expected = centred / torch.sqrt((centred**2).sum(-1, keepdim=True) / 5 + 0.1) * (W + gamma_offset) + B
    got = layer_norm(X, W, B, 0.1, zero_centered=gamma_offset > 0)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_statistics_of_half_precision_are_fp32():
    # 300^2 * 4096 overflows fp16, and bf16 sums of 4096 squares lose digits.
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-5), torch.ones_like(x))


def test_output_has_the_dtype_of_the_weight():
    assert rms_norm(X.float(), W.bfloat16(), 1e-5).dtype == torch.bfloat16
    assert layer_norm(X.float(), W.bfloat16(), B.bfloat16(), 1e-5).dtype == torch.bfloat16


def test_zero_centred_weight_keeps_digits_that_bf16_would_round_away():
    # 1 + 2^-8 is 1 in bf16. With x = (1, 2) the second channel is 2 / sqrt(2.5) * (1 + 2^-8) = 1.26985.
    weight = torch.full((2,), 2.0**-8, dtype=torch.bfloat16)
    got = rms_norm(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), weight, 0.0, zero_centered=True)
    assert got[0, 1].item() == 1.2734375
