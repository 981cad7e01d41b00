"""Tokens to rows and back."""

import pytest
import torch

from megatron.core.transformer.moe import permute as permute_module
from megatron.core.transformer.moe.permute import build_row_order, permute, regroup_by_expert, sum_rows, unpermute
from tests.common.moe_layers import normal

ROUTING = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)


def test_rows_are_ordered_by_expert_then_token():
    hidden = torch.tensor([[10.0], [11.0], [12.0], [13.0]])
    probs = torch.arange(12.0).view(4, 3)
    rows, row_probs = permute(hidden, probs, build_row_order(ROUTING, 6))
    assert rows.flatten().tolist() == [10, 12, 11, 12, 10, 11]
    assert row_probs.tolist() == [0, 6, 4, 7, 2, 5]


def test_unpermute_adds_the_rows_of_a_token():
    order = build_row_order(ROUTING, 6)
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    assert unpermute(rows, order, torch.float32).flatten().tolist() == [17, 36, 10, 0]


def test_gradients_agree_with_finite_differences():
    order = build_row_order(ROUTING, 6)
    hidden, probs, rows = normal(4, 5).requires_grad_(), normal(4, 3).requires_grad_(), normal(6, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, p: permute(x, p, order), (hidden, probs))
    assert torch.autograd.gradcheck(lambda x: unpermute(x, order, torch.float64), (rows,))


def test_no_tokens_and_no_rows():
    hidden, probs = torch.zeros(0, 5, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    order = build_row_order(torch.zeros(0, 3, dtype=torch.bool), 0)
    rows, row_probs = permute(hidden, probs, order)
    (unpermute(rows, order, torch.float32).sum() + row_probs.sum()).backward()
    assert hidden.grad.shape == (0, 5)
    assert probs.grad.shape == (0, 3)


def test_inputs_need_not_be_contiguous():
    order = build_row_order(ROUTING, 6)
    hidden, probs = normal(5, 4), normal(3, 4)
    rows, row_probs = permute(hidden.t(), probs.t(), order)
    expected = permute(hidden.t().contiguous(), probs.t().contiguous(), order)
    assert torch.equal(rows, expected[0])
    assert torch.equal(row_probs, expected[1])


@pytest.mark.parametrize("has_slots", [True, False])
def test_bf16_sums_are_rounded_once(has_slots):
    token_ids = torch.tensor([0, 1, 0, 1, 0, 1])
    slots = torch.tensor([[0, 2, 4], [1, 3, 5]]) if has_slots else None
    rows = torch.tensor([[256.0], [1.0], [1.0], [2.0], [1.0], [3.0]], dtype=torch.bfloat16)
    got = sum_rows(rows, token_ids, slots, 2, torch.bfloat16)
    assert got.flatten().tolist() == [258, 6]  # 256 + 1 is 256 in bf16


def test_bf16_gradient_of_permute_is_rounded_once():
    routing_map = torch.ones(1, 3, dtype=torch.bool)
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    rows, _ = permute(hidden, torch.ones(1, 3), build_row_order(routing_map, 3))
    rows.backward(torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16))
    assert hidden.grad.item() == 258


def test_both_ways_of_summing_agree():
    routing_map = torch.zeros(64, 8, dtype=torch.bool).scatter_(1, normal(64, 8).topk(3).indices, True)
    order = build_row_order(routing_map, 192)
    slots = order.token_ids.argsort(stable=True).view(64, 3)
    rows = normal(192, 16)
    indexed = sum_rows(rows, order.token_ids, None, 64, torch.float64)
    assert torch.allclose(sum_rows(rows, order.token_ids, slots, 64, torch.float64), indexed, rtol=1e-14)


def test_regrouping_sorts_by_expert_then_source_rank():
    counts = torch.tensor([[2, 0, 1], [1, 3, 0]])

    names = torch.tensor([0, 1, 20, 100, 110, 111, 112])  # source * 100 + expert * 10 + position
    shuffle = regroup_by_expert(counts, 7)
    assert shuffle.apply(names).tolist() == [0, 1, 100, 110, 111, 112, 20]
    assert torch.equal(shuffle.undo(shuffle.apply(names)), names)


def test_regrouping_has_the_inverse_as_gradient():
    shuffle = regroup_by_expert(torch.tensor([[2, 0, 1], [1, 3, 0]]), 7)
    rows = normal(7, 2).requires_grad_()
    assert torch.autograd.gradcheck(shuffle.apply, (rows,))
    assert torch.autograd.gradcheck(shuffle.undo, (rows,))


def test_tensors_survive_only_through_save_for_backward():
    order = build_row_order(ROUTING, 6)
    saved = []
    hidden = normal(4, 5).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        rows, _ = permute_module.permute(hidden, normal(4, 3), order)
        permute_module.unpermute(rows, order, torch.float64)
    assert all(t is None or not t.is_floating_point() for t in saved)


@pytest.mark.parametrize(("rows_per_token", "slots"), [(2, 2), (None, 3)])
def test_fused_order_gives_the_same_bits(rows_per_token, slots):
    routing_map = torch.zeros(5, 4, dtype=torch.bool).scatter_(1, normal(5, 4).topk(2).indices, True)
    if rows_per_token is None:
        routing_map[1], routing_map[3, 0] = False, True
    num_rows, outputs = int(routing_map.sum()), []
    for fused_slots in (None, slots):
        order = build_row_order(routing_map, num_rows, rows_per_token, fused_slots)
        hidden, probs = (normal(5, width, dtype=torch.float32).requires_grad_() for width in (8, 4))
        rows, row_probs = permute(hidden, probs, order)
        summed = unpermute(rows * row_probs.unsqueeze(1), order, torch.float32)
        (summed * normal(5, 8, seed=2, dtype=torch.float32)).sum().backward()
        outputs.append((rows, row_probs, summed, hidden.grad, probs.grad))
    assert all(torch.equal(plain, fused) for plain, fused in zip(*outputs, strict=True))
