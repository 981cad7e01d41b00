"""The reference model against finite differences, literals, and itself with a fault."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megatron.core.transformer import TransformerConfig
from tests.common.forced_router import all_to_experts, none_to_expert, spread_evenly
from tests.common.reference import Batch, assert_matches, make_weights, reference_step
from tests.common.reference_model import GptShape
from tests.common.reference_router import balance_loss, loss_scores, plain_counts, route

LOGITS = torch.tensor([[1, 2, 0.5, -1, 0, 1.5, -0.5, 0.25], [0, -2, 1, 3, 2.5, 0.5, -1.5, 0.75]], dtype=torch.float64)
SAMPLES = torch.zeros(2, dtype=torch.int64)


def make_config(**changes):
    fields = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "ffn_hidden_size": 8,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 4,
        "moe_router_topk": 2,
        "moe_layer_freq": [0, 1],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "params_dtype": torch.float64,
        "device": "cpu",
    }
    return TransformerConfig(**(fields | changes))


def small_step(config, shape=None, weights=None, **options):
    shape = shape or GptShape(vocab_size=13, max_sequence_length=4)
    batch = Batch.random(num_samples=2, seq_length=4, vocab_size=13, seed=1)
    weights = weights or make_weights(config, shape, seed=3)
    return weights, reference_step(config, shape, batch, weights, **options)


CASES = {
    "softmax_aux_z": {"moe_aux_loss_coeff": 0.02, "moe_z_loss_coeff": 0.01},
    "sigmoid_groups_bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "layernorm_bias_dense": {
        "num_moe_experts": None,
        "moe_layer_freq": 1,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": F.gelu,
        "qk_layernorm": True,
    },
    "shared_gate_several_losses": {
        "moe_shared_expert_intermediate_size": 4,
        "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.02, 0.03],
    },
}


def objective(config, shape, weights):
    """The number that the reference differentiates; all coefficients refer to logged values at one rank."""
    batch = Batch.random(num_samples=2, seq_length=3, vocab_size=13, seed=1)
    result = reference_step(config, shape, batch, weights, micro_batch_size=2)
    coefficients = dict(zip(config.balancing_types, config.aux_loss_coefficients, strict=True))
    coefficients["z_loss"] = config.moe_z_loss_coeff
    return result.loss + sum(coefficients[name] * value for name, value in result.aux.items())


@pytest.mark.parametrize("case", CASES)
def test_gradients_agree_with_finite_differences_on_20_elements(case):
    config = make_config(**CASES[case])
    shape = GptShape(vocab_size=13, max_sequence_length=4, position_embedding_type="learned_absolute")
    weights = make_weights(config, shape, seed=3)
    batch = Batch.random(num_samples=2, seq_length=3, vocab_size=13, seed=1)
    result = reference_step(config, shape, batch, weights, micro_batch_size=2)
    generator = torch.Generator().manual_seed(7)
    names = sorted(weights)
    for _ in range(20):
        name = names[int(torch.randint(len(names), (1,), generator=generator))]
        element = int(torch.randint(weights[name].numel(), (1,), generator=generator))
        sides = []
        for step in (1e-5, -1e-5):
            moved = {n: w.clone() for n, w in weights.items()}
            moved[name].view(-1)[element] += step
            sides.append(objective(config, shape, moved))
        expected = (sides[0] - sides[1]) / 2e-5
        assert float(result.grads[name].view(-1)[element]) == pytest.approx(expected, rel=1e-5, abs=1e-9), name


ROUTES = [
    ({}, [{1: 0.6224594, 5: 0.3775407}, {3: 0.6224594, 4: 0.3775407}]),
    ({"moe_router_pre_softmax": True}, [{1: 0.3790001, 5: 0.2298752}, {3: 0.5007551, 4: 0.3037233}]),
    (
        {"moe_router_pre_softmax": True, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
        [{0: 0.1394264, 1: 0.3790001}, {2: 0.0677698, 3: 0.5007551}],
    ),
    ({"moe_router_score_function": "sigmoid"}, [{1: 0.5186127, 5: 0.4813873}, {3: 0.507575, 4: 0.492425}]),
    ({"moe_router_score_function": "sqrtsoftplus"}, [{1: 0.5278735, 5: 0.4721265}, {3: 0.5209027, 4: 0.4790973}]),
]


@pytest.mark.parametrize(("changes", "expected"), ROUTES)
def test_routes_equal_the_published_vectors(changes, expected):
    routing = route(LOGITS, make_config(num_moe_experts=8, **changes), SAMPLES)
    for row, wanted in zip(routing.probs, expected, strict=True):
        assert {e: float(p) for e, p in enumerate(row) if p > 0} == pytest.approx(wanted, abs=1e-7)


def test_bias_shifts_the_choice_and_not_the_weights():
    bias = torch.tensor([0, 0, 0, 0, 0, 0, 0.6, 0.6], dtype=torch.float64)
    config = make_config(num_moe_experts=8, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    routing = route(LOGITS, config, SAMPLES, bias=bias)
    assert {e: round(float(p), 7) for e, p in enumerate(routing.probs[0]) if p > 0} == {6: 0.4017599, 7: 0.5982401}


@pytest.mark.parametrize(("function", "expected"), [("softmax", 0.01527994), ("sigmoid", 0.0107408)])
def test_balance_loss_equals_the_published_value(function, expected):
    config = make_config(num_moe_experts=8, moe_router_score_function=function)
    scores = loss_scores(route(LOGITS, config, SAMPLES), config)
    value = 0.01 * balance_loss(scores.sum(0), plain_counts(scores, 2), 2, config)
    assert round(float(value), 8) == pytest.approx(expected, abs=1e-7)


def test_sinkhorn_balances_the_choice():
    config = make_config(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1)
    logits = torch.tensor([[2.0, 1.9, 0, 0], [2.0, 1.0, 0, 0], [2.0, 0, 1.9, 0], [2.0, 0, 0, 1.9]]).double()
    routing = route(logits, config, torch.zeros(4, dtype=torch.int64))
    assert routing.routing_map.nonzero()[:, 1].tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("changes", "survivor", "rows_per_expert"),
    [
        ({"moe_token_drop_policy": "probs"}, 1, [1, 0, 0, 0]),
        ({"moe_token_drop_policy": "position"}, 0, [1, 0, 0, 0]),
        ({"moe_pad_expert_input_to_capacity": True}, 1, [1, 1, 1, 1]),
    ],
)
def test_capacity_keeps_the_documented_tokens(changes, survivor, rows_per_expert):
    config = make_config(moe_router_topk=1, moe_router_pre_softmax=True, moe_expert_capacity_factor=2.0, **changes)
    logits = torch.tensor([[3.0, 0, 0, 0], [5.0, 0, 0, 0]]).double()  # C = ceil(2 * 1 / 4 * 2) = 1
    routing = route(logits, config, SAMPLES)
    assert routing.routing_map[:, 0].nonzero().flatten().tolist() == [survivor]
    assert routing.routing_map.sum(0).tolist() == rows_per_expert
    assert float(routing.probs.sum()) == float(routing.probs[survivor, 0]) > 0.8


def test_expert_without_tokens_gets_a_zero_gradient():
    _, result = small_step(make_config(), plan=none_to_expert(3, 4, 2))
    assert float(result.grads["decoder.layers.1.mlp.experts.linear_fc1.weight3"].abs().max()) == 0.0
    assert result.tokens_per_expert[1].tolist()[3] == 0


def test_cut_into_ranks_changes_nothing_but_the_global_loss():
    config = make_config(moe_aux_loss_coeff=0.02, moe_z_loss_coeff=0.01)
    _, one = small_step(config, micro_batch_size=1)
    _, two = small_step(config, micro_batch_size=1, data_parallel_size=2)
    assert_matches(one, two)


def test_per_token_loss_weighs_tokens_alike():
    weights = make_weights(make_config(), GptShape(vocab_size=13), seed=3)
    batch = Batch.random(2, 4, 13, seed=1)
    mask = batch.loss_mask.clone()
    mask[0, 1:] = 0
    batch = dataclasses.replace(batch, loss_mask=mask)
    shape = GptShape(vocab_size=13)
    token = reference_step(make_config(calculate_per_token_loss=True), shape, batch, weights)
    mean = reference_step(make_config(), shape, batch, weights)
    whole = reference_step(make_config(), shape, batch, weights, micro_batch_size=2)
    assert token.loss == mean.loss
    assert_matches(whole, token)
    assert token.grad_norm != pytest.approx(mean.grad_norm, rel=1e-3)


def test_doubled_gradient_fails_with_its_name_and_ratio():
    _, result = small_step(make_config())
    broken = copy.deepcopy(result)
    broken.grads["decoder.layers.1.mlp.router.weight"] *= 2
    with pytest.raises(AssertionError, match=r"router\.weight: 1, 2"):
        assert_matches(result, broken)
    assert_matches(result, copy.deepcopy(result))


@pytest.mark.parametrize(
    ("field", "value"),
    [("loss", 1.0), ("grad_norm", 1.0), ("aux", {}), ("tokens_per_expert", {1: torch.zeros(4)})],
)
def test_other_value_of_any_field_fails(field, value):
    _, result = small_step(make_config(moe_aux_loss_coeff=0.02))
    with pytest.raises(AssertionError):
        assert_matches(result, dataclasses.replace(result, **{field: value}))


def test_nan_gradient_fails():
    _, result = small_step(make_config())
    broken = copy.deepcopy(result)
    broken.grads["output_layer.weight"][0, 0] = float("nan")
    with pytest.raises(AssertionError, match=r"output_layer\.weight: inf, nan"):
        assert_matches(result, broken)


def test_weights_depend_on_name_and_seed_alone():
    few, many = (make_weights(make_config(num_layers=n, moe_layer_freq=1), GptShape(), 3) for n in (1, 2))
    assert all(torch.equal(few[name], many[name]) for name in few)
    assert len({w.sum().item() for w in many.values()}) == len(many)


def test_plans_fill_the_experts_they_name():
    ids = torch.arange(8)
    assert torch.bincount(spread_evenly(4, 2)(0, ids).flatten(), minlength=4).tolist() == [4, 4, 4, 4]
    assert torch.bincount(all_to_experts((1, 3), 2)(0, ids).flatten(), minlength=4).tolist() == [0, 8, 0, 8]
    assert torch.bincount(none_to_expert(2, 4, 2)(0, ids).flatten(), minlength=4)[2] == 0
