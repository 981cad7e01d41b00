"""Routing by formulas: scores, choice, weights."""

import pytest
import torch

from megatron.core.transformer.moe.topk import (
    RoutingRule,
    score_experts,
    sinkhorn,
    sinkhorn_routing,
    sqrt_softplus,
    topk_routing,
)

LOGITS = torch.tensor(
    [[1, 2, 0.5, -1, 0, 1.5, -0.5, 0.25], [0, -2, 1, 3, 2.5, 0.5, -1.5, 0.75]],
    dtype=torch.float64,
)
BIAS_ON_6_AND_7 = torch.tensor([0, 0, 0, 0, 0, 0, 0.6, 0.6])

# (rule, bias, {expert: weight} of token 0, of token 1)
VECTORS = {
    "softmax_after": (RoutingRule(2), None, {1: 0.6224594, 5: 0.3775407}, {3: 0.6224594, 4: 0.3775407}),
    "softmax_before": (
        RoutingRule(2, use_pre_softmax=True),
        None,
        {1: 0.3790001, 5: 0.2298752},
        {3: 0.5007551, 4: 0.3037233},
    ),
    "softmax_before_1_of_4_groups": (
        RoutingRule(2, use_pre_softmax=True, num_groups=4, group_topk=1),
        None,
        {0: 0.1394264, 1: 0.3790001},
        {2: 0.0677698, 3: 0.5007551},
    ),
    "sigmoid": (RoutingRule(2, "sigmoid"), None, {1: 0.5186127, 5: 0.4813873}, {3: 0.507575, 4: 0.492425}),
    "sigmoid_bias": (
        RoutingRule(2, "sigmoid"),
        BIAS_ON_6_AND_7,
        {6: 0.4017599, 7: 0.5982401},
        {3: 0.5837736, 7: 0.4162265},
    ),
    "sqrtsoftplus": (RoutingRule(2, "sqrtsoftplus"), None, {1: 0.5278735, 5: 0.4721265}, {3: 0.5209027, 4: 0.4790973}),
}


@pytest.mark.parametrize("name", VECTORS)
def test_known_vectors(name):
    rule, bias, *tokens = VECTORS[name]
    probs, routing_map = topk_routing(LOGITS, rule, bias)
    for row, chosen, expected in zip(probs, routing_map, tokens, strict=True):
        assert chosen.nonzero().flatten().tolist() == list(expected)
        assert row[chosen].tolist() == pytest.approx(list(expected.values()), abs=1e-7)
        assert row[~chosen].abs().sum() == 0.0


# logits (2, 1, 0), top-2: (rule fields, weights of experts 0 and 1)
ORDERS = {
    "before": ({"use_pre_softmax": True}, (0.6652, 0.2447)),
    "after": ({}, (0.7311, 0.2689)),
    "sigmoid": ({"score_function": "sigmoid"}, (0.5464, 0.4536)),
}


@pytest.mark.parametrize("scale", [None, 2.5])
@pytest.mark.parametrize("name", ORDERS)
def test_scale_multiplies_last(name, scale):
    fields, expected = ORDERS[name]
    probs, _ = topk_routing(torch.tensor([[2.0, 1.0, 0.0]]), RoutingRule(2, **fields, scaling_factor=scale))
    assert probs[0, :2].tolist() == pytest.approx([value * (scale or 1.0) for value in expected], abs=3e-4)


def test_sigmoid_of_a_single_expert_is_not_normalised():
    probs, _ = topk_routing(torch.tensor([[2.0, 1.0, 0.0]]), RoutingRule(1, "sigmoid"))
    assert probs[0].tolist() == pytest.approx([0.8808, 0.0, 0.0], abs=1e-4)


@pytest.mark.parametrize("fields", [fields for fields, _ in ORDERS.values()] + [{"score_function": "sqrtsoftplus"}])
def test_gradients_agree_with_finite_differences(fields):
    logits = torch.tensor([[0.3, -0.7, 1.1, 0.2], [2.0, 0.1, -1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    rule = RoutingRule(2, **fields, scaling_factor=2.5)
    assert torch.autograd.gradcheck(lambda x: topk_routing(x, rule)[0], (logits,))


def test_groups_are_kept_when_all_scores_are_negative():
    logits = torch.tensor([[-9.0, -8.0, -1.0, -2.0]])
    _, routing_map = topk_routing(logits, RoutingRule(2, num_groups=2, group_topk=1))
    assert routing_map.tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
def test_bf16_logits_below_zero_choose_what_exact_arithmetic_chooses(score_function, magnitude):
    generator = torch.Generator().manual_seed(3)
    spread = torch.stack([torch.randperm(16, generator=generator) for _ in range(64)])
    logits = (-(spread + 1) * magnitude / 16).to(torch.bfloat16)
    _, routing_map = topk_routing(logits, RoutingRule(3, score_function))
    assert torch.equal(routing_map, spread < 3)


def test_probs_come_back_in_the_dtype_of_the_logits():
    assert topk_routing(LOGITS.bfloat16(), RoutingRule(2))[0].dtype == torch.bfloat16
    assert score_experts(LOGITS.bfloat16(), RoutingRule(2)).dtype == torch.float32


def test_sqrt_softplus_has_a_finite_gradient_where_softplus_underflows():
    x = torch.tensor([-1e4, -200.0, -31.0, -29.0, 0.0, 50.0], requires_grad=True)
    y = sqrt_softplus(x)
    y.sum().backward()
    assert y.tolist() == pytest.approx([0.0, 0.0, 1.8553913626e-7, 5.0434766256e-7, 0.8325546, 7.0710678], rel=1e-6)
    assert x.grad.tolist() == pytest.approx([0.0, 0.0, 9.276957e-8, 2.5217383e-7, 0.3002806, 0.0707107], rel=1e-5)


def test_sinkhorn_balances_rows_and_columns():
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    balanced = sinkhorn(logits)
    assert balanced.sum(dim=1).tolist() == pytest.approx([1 / 64] * 64, rel=2e-2)
    assert balanced.sum(dim=0).tolist() == pytest.approx([1 / 4] * 4, rel=1e-3)


def test_sinkhorn_chooses_by_balance_in_training_and_by_logits_in_evaluation():
    logits = torch.tensor([[3.0, 0.5], [2.0, 0.5], [1.5, 0.5], [1.0, 0.5]])
    trained, training_map = sinkhorn_routing(logits, 1, is_training=True)
    _, evaluation_map = sinkhorn_routing(logits, 1, is_training=False)
    assert training_map.sum(dim=0).tolist() == [2, 2]
    assert evaluation_map.sum(dim=0).tolist() == [4, 0]
    assert trained[0].tolist() == pytest.approx([0.9525741, 0.0])  # the weight is the plain sigmoid


def test_sinkhorn_ends_although_its_scaling_drifts():
    # the third column's scaling is about 250, where the drift by 1e-8 alone exceeds the tolerance in every round
    logits = torch.tensor(
        [
            [2.2273, 2.8544, -4.2116, 1.7455],
            [-0.7362, 1.4827, -2.5098, 4.4712],
            [0.9890, 2.8124, -0.1923, 4.8326],
            [1.7605, 3.2932, -2.9315, 5.6854],
            [1.5180, 5.1049, -3.5371, 3.8612],
            [1.7982, 3.8982, -2.7583, 4.8257],
        ],
        dtype=torch.float64,
    )
    balanced = sinkhorn(logits)
    assert balanced.sum(dim=0).tolist() == pytest.approx([0.25] * 4, rel=1e-4)
    assert balanced.sum(dim=1).tolist() == pytest.approx([1 / 6] * 6, rel=1e-3)
