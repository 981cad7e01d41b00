"""Expert capacity: who is dropped, who fills up."""

import pytest
import torch

from megatron.core.transformer.moe.capacity import apply_capacity, expert_capacity


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "factor", "expected"), [(4, 8, 1, 1), (32768, 64, 1.25, 640), (10, 4, 0.5, 2)]
)
def test_known_capacities(num_pairs, num_experts, factor, expected):
    assert expert_capacity(num_pairs, num_experts, factor) == expected


PROBS = torch.tensor([[0.2, 0.8], [0.9, 0.0], [0.4, 0.6], [0.3, 0.0]], dtype=torch.float64)
CHOSEN = PROBS > 0


def test_probs_policy_keeps_the_highest_weights_and_does_not_renormalise():
    probs, routing_map = apply_capacity(PROBS, CHOSEN, 2, "probs", is_padded=False)
    assert routing_map.tolist() == [[False, True], [True, False], [True, True], [False, False]]
    assert probs.tolist() == [[0.0, 0.8], [0.9, 0.0], [0.4, 0.6], [0.0, 0.0]]


def test_position_policy_keeps_the_earliest_tokens():
    _, routing_map = apply_capacity(PROBS, CHOSEN, 2, "position", is_padded=False)
    assert routing_map.tolist() == [[True, True], [True, False], [False, True], [False, False]]


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_padding_fills_every_column_with_weight_zero(policy):
    probs, routing_map = apply_capacity(PROBS, CHOSEN, 3, policy, is_padded=True)
    assert routing_map.sum(dim=0).tolist() == [3, 3]
    assert routing_map[:, 1].tolist() == [True, True, True, False]  # the first token that did not choose it
    assert probs[1, 1] == 0.0


def test_padding_prefers_a_chosen_pair_of_weight_zero_to_an_unchosen_one():
    probs = torch.zeros(3, 1)
    routing_map = torch.tensor([[False], [False], [True]])
    assert apply_capacity(probs, routing_map, 1, "probs", is_padded=True)[1].tolist() == [[False], [False], [True]]


def test_capacity_above_the_token_count_keeps_all():
    probs, routing_map = apply_capacity(PROBS, CHOSEN, 9, "probs", is_padded=False)
    assert torch.equal(routing_map, CHOSEN)
    assert torch.equal(probs, PROBS)
    assert apply_capacity(PROBS, CHOSEN, 9, "probs", is_padded=True)[1].all()


def test_dropped_pairs_get_no_gradient():
    probs = PROBS.clone().requires_grad_()
    apply_capacity(probs, CHOSEN, 1, "probs", is_padded=False)[0].sum().backward()
    assert probs.grad.tolist() == [[0, 1], [1, 0], [0, 0], [0, 0]]
