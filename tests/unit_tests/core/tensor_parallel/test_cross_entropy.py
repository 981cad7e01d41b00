"""Cross entropy with a padded vocabulary."""

import math

import pytest
import torch

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.common.small_models import normal

TARGET = torch.tensor([[0, 3], [6, 2], [1, 1]])


def loss_and_grad(logits, **arguments):
    logits = logits.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, TARGET, **arguments)
    losses.backward(torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.5]], dtype=losses.dtype))
    return losses.detach(), logits.grad


def test_value_of_one_token():
    logits = torch.tensor([[[0.0, 1.0, 2.0]]])
    got = vocab_parallel_cross_entropy(logits, torch.tensor([[1]]))
    assert got.item() == pytest.approx(math.log(1 + math.e + math.e**2) - 1, rel=1e-6)


def test_matches_log_softmax_with_gradient():
    logits = normal(3, 2, 7).requires_grad_()
    expected = torch.logsumexp(logits, -1) - logits.gather(-1, TARGET[..., None])[..., 0]
    expected.backward(torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.5]]).double())
    losses, grad = loss_and_grad(logits.detach())
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, logits.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("filler", [47, 175])
def test_filler_rows_change_neither_loss_nor_gradient(filler):
    logits = normal(3, 2, 7)
    padded = torch.cat((logits, torch.full((3, 2, filler), 50.0).double()), -1)
    losses, grad = loss_and_grad(logits)
    padded_losses, padded_grad = loss_and_grad(padded, true_vocab_size=7)
    assert torch.equal(losses, padded_losses)
    assert torch.equal(grad, padded_grad[..., :7])
    assert (padded_grad[..., 7:] == 0).all()


def test_half_precision_logits_are_scored_in_fp32():
    logits = normal(3, 2, 7).bfloat16()
    losses, grad = loss_and_grad(logits)
    assert (losses.dtype, grad.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(losses, loss_and_grad(logits.double())[0].float(), rtol=1e-6, atol=1e-6)


def test_dtype_can_be_forced():
    assert loss_and_grad(normal(3, 2, 7).half(), dtype=torch.float16)[0].dtype == torch.float16


def test_large_logits_do_not_overflow():
    losses, grad = loss_and_grad(normal(3, 2, 7).float() * 1e4)
    assert losses.isfinite().all()
    assert grad.isfinite().all()
