"""Activation times routing probability."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_weighted_activation import weighted_activation
from tests.common.moe_layers import normal


def squared_relu(x):
    return F.relu(x) ** 2


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("activation", [F.silu, F.gelu, squared_relu])
def test_value_and_gradients_are_those_of_the_formula(activation, is_gated):
    x, probs = normal(5, 8).requires_grad_(), normal(5, seed=1).requires_grad_()
    expected = activation(x[:, :4]) * x[:, 4:] if is_gated else activation(x)
    out = weighted_activation(x, probs, activation, is_gated)
    assert torch.equal(out, expected * probs.unsqueeze(1))
    assert torch.autograd.gradcheck(lambda x, p: weighted_activation(x, p, activation, is_gated), (x, probs))


@pytest.mark.parametrize("is_gated", [True, False])
def test_bf16_is_rounded_once(is_gated):
    x, probs = normal(64, 32, dtype=torch.bfloat16), normal(64, seed=1, dtype=torch.float32)
    wide = weighted_activation(x.float(), probs, F.silu, is_gated)
    assert torch.equal(weighted_activation(x, probs, F.silu, is_gated), wide.bfloat16())


def test_bf16_gradients_are_within_one_rounding():
    x, probs, grad = normal(64, 32, dtype=torch.bfloat16), normal(64, seed=1).float(), normal(64, 16, seed=2).bfloat16()
    narrow, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    p32, p64 = probs.clone().requires_grad_(), probs.double().requires_grad_()
    weighted_activation(narrow, p32, F.silu, True).backward(grad)
    weighted_activation(wide, p64, F.silu, True).backward(grad.double())
    assert narrow.grad.dtype == torch.bfloat16
    assert p32.grad.dtype == torch.float32
    assert torch.allclose(narrow.grad.double(), wide.grad, rtol=2**-8, atol=1e-6)
    assert torch.allclose(p32.grad.double(), p64.grad, rtol=1e-4, atol=1e-5)


def test_without_probabilities_it_is_the_activation():
    x = normal(3, 8)
    assert torch.equal(weighted_activation(x, None, F.silu, True), F.silu(x[:, :4]) * x[:, 4:])
