"""Copying into rows and adding up again: plain form against formulas, kernels under the interpreter bit for bit."""

import pytest
import torch

from megatron.core.fusions.fused_permute import (
    gather_rows,
    kernel_gather,
    kernel_spread,
    kernel_sum,
    permute_rows,
    spread_rows,
    sum_rows,
    unpermute_rows,
)
from megatron.core.fusions.fused_row_layout import row_layout
from tests.common.moe_layers import normal
from tests.common.poison import fresh_memory_poison
from tests.unit_tests.core.fusions.test_fused_row_layout import random_ids

IDS = torch.tensor([[0, 1], [1, -1], [-1, -1]], dtype=torch.int32)


def test_rows_hold_their_tokens_and_padding_holds_zeros():
    tokens, probs = normal(3, 2), normal(3, 2, seed=1)
    rows, row_probs = permute_rows(tokens, probs, row_layout(IDS, 2, 6, 3))
    assert torch.equal(
        rows, torch.stack([tokens[0], 0 * tokens[0], 0 * tokens[0], tokens[0], tokens[1], 0 * tokens[0]])
    )
    assert torch.equal(
        row_probs, torch.stack([probs[0, 0], *[probs.new_zeros(())] * 2, probs[0, 1], probs[1, 0], probs.new_zeros(())])
    )


def test_rows_behind_the_last_expert_are_neither_written_nor_read():
    layout = row_layout(IDS, 2, 5, has_tail=True)
    tokens = normal(3, 2).requires_grad_()
    with fresh_memory_poison():
        rows, _ = permute_rows(tokens, None, layout)
        assert rows[3:].isnan().all()
        summed = unpermute_rows(rows, layout, torch.float64)
        summed.sum().backward()
    assert torch.equal(summed, tokens * torch.tensor([[2.0], [1.0], [0.0]]))
    assert torch.equal(tokens.grad, torch.tensor([[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64))


def test_gradients_are_those_of_the_formula():
    layout = row_layout(random_ids(5, 3, 4), 4, 16, 2, has_tail=True)
    kept = (layout.pairs > -2).double().unsqueeze(1)
    tokens, probs, rows = (x.requires_grad_() for x in (normal(5, 3), normal(5, 3, seed=1), normal(16, 3, seed=2)))

    def gather(tokens, probs):
        rows, row_probs = permute_rows(tokens, probs, layout)
        return torch.where(kept > 0, rows, 0), torch.where(kept[:, 0] > 0, row_probs, 0)

    assert torch.autograd.gradcheck(gather, (tokens, probs))
    assert torch.autograd.gradcheck(lambda rows: unpermute_rows(rows * (kept > 0), layout, torch.float64), (rows,))


def test_bf16_sum_is_rounded_once():
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    total, _ = sum_rows(rows, None, torch.tensor([[0, 1, 2]]), torch.bfloat16)
    assert total.item() == 258.0


def both(job, cases, interpreted):
    """Answers of the plain form and of the kernels, tensors side by side."""
    for plain, kernel in zip(job(cases, False), interpreted(job, cases, True), strict=True):
        yield from ((a, b) for a, b in zip(plain, kernel, strict=True) if a is not None)


def gather_job(cases, use_kernel):
    return [
        kernel_gather(tokens, probs, layout.pairs, layout.slots_per_token)
        if use_kernel
        else gather_rows(tokens, probs, layout.pairs, layout.slots_per_token)
        for tokens, probs, layout in cases
    ]


def spread_job(cases, use_kernel):
    call = kernel_spread if use_kernel else spread_rows
    return [call(*case) for case in cases]


def sum_job(cases, use_kernel):
    call = kernel_sum if use_kernel else sum_rows
    return [call(rows, probs, layout.slots, dtype) for rows, probs, layout, dtype in cases]


def layouts():
    """Layouts that leave no tail, with their sizes."""
    for i, (tokens, slots, experts) in enumerate([(0, 2, 4), (1, 1, 1), (65, 3, 5)]):
        ids = random_ids(tokens, slots, experts, seed=i)
        probe = row_layout(ids, experts, 10_000, 4, has_tail=True)
        yield tokens, slots, row_layout(ids, experts, int(probe.tokens_per_expert.sum()), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gather_kernel_is_the_plain_form(interpreted, dtype):
    cases = []
    for tokens, slots, layout in layouts():
        wide = normal(tokens, 130, dtype=dtype)
        cases += [(wide[:, :128], normal(tokens, slots, dtype=torch.float32), layout), (wide, None, layout)]
        cases += [(wide[:, ::2], None, layout), (wide[:, 0:1].expand(-1, 5), None, layout)]
        cases += [(wide[:1].expand(tokens, -1), None, layout)]
    assert all(torch.equal(plain, kernel) for plain, kernel in both(gather_job, cases, interpreted))
    assert all(torch.equal(plain, kernel) for plain, kernel in both(spread_job, cases, interpreted))


def test_spread_kernel_leaves_what_is_behind_the_last_expert(interpreted):
    tokens, layout = normal(65, 16), row_layout(random_ids(65, 3, 5), 5, 300, 4, has_tail=True)
    ((plain, kernel),) = both(spread_job, [(tokens, None, layout)], interpreted)
    written = layout.pairs > -2
    assert torch.equal(plain[written], kernel[written])
    assert (~written).any()
    assert (layout.pairs == -1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sum_kernel_is_the_plain_form_bit_for_bit(interpreted, dtype):
    cases = []
    for _, _, layout in layouts():
        rows = normal(len(layout.pairs), 130, dtype=dtype)
        rows[layout.pairs < 0] = float("nan")
        cases += [(rows[:, :128], normal(len(rows), dtype=torch.float32), layout, dtype)]
        cases += [(rows[:, ::2], None, layout, torch.float64 if dtype == torch.float64 else torch.float32)]
    assert all(torch.equal(plain, kernel) for plain, kernel in both(sum_job, cases, interpreted))


def test_wide_rows_are_cut_into_tiles(interpreted):
    layout = row_layout(IDS, 2, 3)
    cases = [(normal(3, 5000, dtype=torch.float32), None, layout)]
    assert all(torch.equal(plain, kernel) for plain, kernel in both(gather_job, cases, interpreted))
    assert all(torch.equal(plain, kernel) for plain, kernel in both(spread_job, cases, interpreted))
    cases = [(normal(3, 5000, dtype=torch.float32), None, layout, torch.float32)]
    assert all(torch.equal(plain, kernel) for plain, kernel in both(sum_job, cases, interpreted))
