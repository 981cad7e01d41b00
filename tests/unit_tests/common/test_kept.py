"""Storages that a pass leaves behind are counted, and only those."""

from collections import Counter

import torch

from tests.common.kept import watch_storages


class Hiding(torch.autograd.Function):
    """Keeps a tensor where `saved_tensors_hooks` would not see it."""

    @staticmethod
    def forward(ctx, x):
        ctx.hidden = torch.ones(7) * x.sum()
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.hidden.sum()


def test_what_backward_needs_counts_once_and_goes_with_it():
    x = torch.ones(3, requires_grad=True)
    with watch_storages(x) as kept:
        output = (x * 2).exp()  # keeps its own result; the product dies
        view = output[:2]
    assert kept() == Counter({(3,): 1})
    del output, view
    assert kept() == Counter()


def test_tensors_hidden_in_a_function_count():
    x = torch.ones(3, requires_grad=True)
    with watch_storages(x) as kept:
        output = Hiding.apply(x)
    assert kept() == Counter({(3,): 1, (7,): 1})
    output.sum().backward()
    del output
    assert kept() == Counter()
