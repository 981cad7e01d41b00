"""Rows of experts, padded."""

import pytest
import torch

from megatron.core.fp8.padding import plan_padding


@pytest.mark.parametrize(
    ("multiple", "expected"), [(16, [0, 16, 48]), (32, [0, 32, 64]), (128, [0, 128, 128]), (1, [0, 1, 44])]
)
def test_counts_are_rounded_up(multiple, expected):
    assert plan_padding(torch.tensor([0, 1, 44]), 45, multiple).tokens_per_expert.tolist() == expected


def test_padding_rows_are_zero_and_rows_come_back():
    rows = torch.arange(1.0, 7.0).unsqueeze(1)
    padding = plan_padding(torch.tensor([2, 0, 3]), 6, 4)
    padded = padding.pad(rows)
    assert padded[:8].flatten().tolist() == [1, 2, 0, 0, 3, 4, 5, 0]
    assert padding.num_padded == 16
    assert torch.equal(padding.unpad(padded)[:5], rows[:5])


def test_gradients_pass_through_and_padding_adds_none():
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    padding = plan_padding(torch.tensor([1, 4]), 5, 8)
    (padding.unpad(padding.pad(rows) * 2) * torch.arange(1.0, 6.0).unsqueeze(1)).sum().backward()
    assert torch.equal(rows.grad, 2 * torch.arange(1.0, 6.0).unsqueeze(1).expand(5, 3))


def test_number_of_padded_rows_depends_on_the_number_of_rows_alone():
    sizes = {plan_padding(torch.tensor(counts), 20, 16).num_padded for counts in ([20, 0], [0, 20], [9, 11], [1, 1])}
    assert len(sizes) == 1
