"""The product of bf16 operands in fp32, against fp64."""

import torch

from megatron.core.fusions.fused_gate import uses_wide_products, wide_linear
from tests.common.small_models import normal


def operands():
    x, weight = normal(7, 3, 40, dtype=torch.bfloat16), normal(6, 40, seed=1, dtype=torch.bfloat16)
    return x.requires_grad_(), weight.requires_grad_(), normal(7, 3, 6, seed=2).float()


def test_product_is_that_of_the_widened_operands():
    x, weight, _ = operands()
    got = wide_linear(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)


def test_gradients_are_rounded_once():
    x, weight, grad = operands()
    wide_linear(x, weight).backward(grad)
    exact = grad.double() @ weight.double(), torch.einsum("abo,abi->oi", grad.double(), x.detach().double())
    for got, wanted in ((x.grad, exact[0]), (weight.grad, exact[1])):
        assert got.dtype == torch.bfloat16
        # half a step of bf16, and what 16 of the gradient's 24 bits leave out
        torch.testing.assert_close(got.double(), wanted, rtol=2.0**-8 * 1.02, atol=1e-4)


def test_gradient_keeps_more_than_half_precision():
    weight = torch.eye(2).bfloat16().requires_grad_()
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).bfloat16()
    grad = torch.tensor([[1.0 + 2.0**-12, 0.0], [1.0, 0.0]])
    wide_linear(x, weight).backward(grad)
    assert weight.grad[0, 0].item() == 2.0**-12


def test_cpu_keeps_the_plain_product():
    x, weight, _ = operands()
    assert not uses_wide_products(x, weight, torch.float32)
