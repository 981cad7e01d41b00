"""Auxiliary losses that ride on an activation."""

import pytest
import torch

from megatron.core import aux_loss_scale


@pytest.fixture(autouse=True)
def fresh_scale():
    aux_loss_scale.reset()
    yield
    aux_loss_scale.reset()


def gradients(scale):
    activation = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    out = aux_loss_scale.attach(activation, weight**2)
    assert torch.equal(out, activation)
    aux_loss_scale.set_aux_loss_scale(scale)
    (out * torch.tensor([5.0, 7.0])).sum().backward()
    return activation.grad.tolist(), weight.grad.item()


def test_activation_keeps_its_gradient_and_loss_gets_the_scale():
    assert gradients(0.5) == ([5.0, 7.0], 3.0)


def test_scale_may_be_a_tensor_of_another_dtype():
    assert gradients(torch.tensor(2.0, dtype=torch.float32)) == ([5.0, 7.0], 12.0)


def test_reset_returns_to_one():
    aux_loss_scale.set_aux_loss_scale(8.0)
    aux_loss_scale.reset()
    assert aux_loss_scale.get_aux_loss_scale() == 1.0
