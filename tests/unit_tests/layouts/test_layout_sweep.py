"""One training step in several layouts against the fp64 reference: loss, gradients, norm, counters, logged values."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.common.collective_log import compare_logs
from tests.common.forced_router import all_to_experts, all_to_rank, none_to_expert, random_plan, spread_evenly
from tests.common.layouts import Layout, run_step
from tests.common.reference import assert_matches, make_weights
from tests.common.reference_model import GptShape
from tests.unit_tests.layouts.cases import (
    DP2,
    EP2,
    EP2_ALLGATHER,
    EP2_DP4,
    EP2_FLEX,
    EP4,
    EP4_ALLGATHER,
    EP4_FLEX,
    NUM_EXPERTS,
    ONE_RANK,
    SEQ_LENGTH,
    TOPK,
    VOCAB_SIZE,
    check_against_reference,
    make_batch,
    make_case,
    masked_batch,
)

START_BIAS = {1: torch.tensor([0.25, -0.125, 0.0, 0.0625])}
SIGMOID_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
ROUTERS = {
    "softmax_post": {},
    "softmax_pre": {"moe_router_pre_softmax": True},
    "softmax_pre_top1": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "softmax_groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    "sigmoid_bias": SIGMOID_BIAS,
    "sigmoid_bias_groups": SIGMOID_BIAS | {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "sqrtsoftplus": {"moe_router_score_function": "sqrtsoftplus"},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "sinkhorn_top1": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
}
LOSSES = {
    "aux": {"moe_aux_loss_coeff": 0.05},
    "seq_aux": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.05},
    "global_aux": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.05},
    "z": {"moe_z_loss_coeff": 0.03},
    "all_at_once": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.05, 0.04, 0.03],
        "moe_z_loss_coeff": 0.02,
        "moe_layer_freq": 1,
    },
    "all_at_once_sigmoid": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.05, 0.04, 0.03],
        "moe_router_score_function": "sigmoid",
    },
}
PLANS = {
    "spread_evenly": spread_evenly(NUM_EXPERTS, TOPK),
    "all_to_rank0": all_to_rank(0, 2, NUM_EXPERTS, TOPK),
    "all_to_rank1": all_to_rank(1, 2, NUM_EXPERTS, TOPK),
    "one_expert_of_each_rank": all_to_experts((1, 2), TOPK),
    "none_to_2": none_to_expert(2, NUM_EXPERTS, TOPK),
    "random7": random_plan(NUM_EXPERTS, TOPK, seed=7),
}
CAPACITIES = {
    "drop_by_probs": {"moe_expert_capacity_factor": 0.75},
    "drop_by_position": {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"},
    "pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "pad_bias": SIGMOID_BIAS | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
}
MODELS = {
    "shared_expert": {"moe_shared_expert_intermediate_size": 4},
    "shared_expert_gate": {"moe_shared_expert_intermediate_size": 4, "moe_shared_expert_gate": True},
    "gelu_layernorm_bias_dense": {
        "num_moe_experts": None,
        "moe_layer_freq": 1,
        "gated_linear_unit": False,
        "activation_func": F.gelu,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    "qkv_bias_qk_layernorm": {"add_qkv_bias": True, "qk_layernorm": True, "num_query_groups": 2},
    "interleaved_rotary": {"rotary_interleaved": True},
    "zero_centered_gamma": {"layernorm_zero_centered_gamma": True, "normalization": "LayerNorm"},
    "probs_on_input": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
}
SHAPES = {
    "tied": GptShape(VOCAB_SIZE, SEQ_LENGTH, share_embeddings_and_output_weights=True),
    "learned_positions": GptShape(VOCAB_SIZE, SEQ_LENGTH, position_embedding_type="learned_absolute"),
    "no_positions": GptShape(VOCAB_SIZE, SEQ_LENGTH, position_embedding_type="none"),
    "half_rotary": GptShape(VOCAB_SIZE, SEQ_LENGTH, rotary_percent=0.5, rotary_base=100),
    "scaled_rotary": GptShape(VOCAB_SIZE, SEQ_LENGTH, rope_scaling=True, rotary_base=500000),
}


def options_of(name):
    """Routers with a bias start with one that is not zero."""
    return {"expert_bias": START_BIAS} if "bias" in name else {}


@pytest.mark.parametrize("router", ROUTERS)
def test_ep2_equals_reference_for_router(pool, router):
    check_against_reference(pool, make_case(**ROUTERS[router]), EP2, make_batch(), **options_of(router))


@pytest.mark.parametrize(
    ("layout", "router"), [(EP2_ALLGATHER, "sigmoid_bias_groups"), (EP2_FLEX, "sinkhorn")], ids=str
)
def test_other_dispatchers_equal_reference_for_router(pool, router, layout):
    check_against_reference(pool, make_case(**ROUTERS[router]), layout, make_batch(), **options_of(router))


@pytest.mark.parametrize(("layout", "router"), [(ONE_RANK, "sigmoid_bias_groups"), (DP2, "softmax_post")], ids=str)
def test_unsplit_experts_equal_reference(pool, layout, router):
    check_against_reference(pool, make_case(**ROUTERS[router]), layout, make_batch(), **options_of(router))


@pytest.mark.parametrize("loss", ["aux", "all_at_once", "all_at_once_sigmoid"])
def test_ep2_equals_reference_for_auxiliary_loss(pool, loss):
    check_against_reference(pool, make_case(**LOSSES[loss]), EP2, make_batch())


@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        (EP2, "all_to_rank0"),
        (EP2, "random7"),
        (EP2_ALLGATHER, "all_to_rank1"),
        (EP2_ALLGATHER, "spread_evenly"),
        (EP2_FLEX, "one_expert_of_each_rank"),
        (EP2_FLEX, "none_to_2"),
    ],
    ids=str,
)
def test_ep2_equals_reference_for_forced_load(pool, layout, plan):
    got = check_against_reference(pool, make_case(), layout, make_batch(), plan=PLANS[plan])
    assert compare_logs(got.logs) == []
    assert float(got.grads["decoder.layers.1.mlp.router.weight"].abs().max()) > 0


@pytest.mark.parametrize(
    ("layout", "capacity"),
    [
        (EP2, "drop_by_probs"),
        (EP2, "pad"),
        (EP2_ALLGATHER, "drop_by_position"),
        (EP2_FLEX, "pad_bias"),
    ],
    ids=str,
)
def test_ep2_equals_reference_under_capacity(pool, layout, capacity):
    check_against_reference(pool, make_case(**CAPACITIES[capacity]), layout, make_batch())


@pytest.mark.parametrize("model", MODELS)
def test_ep2_equals_reference_for_model(pool, model):
    layout = DP2 if "dense" in model else EP2
    check_against_reference(pool, make_case(**MODELS[model]), layout, make_batch())


@pytest.mark.parametrize("shape", SHAPES)
def test_ep2_equals_reference_for_embedding(pool, shape):
    check_against_reference(pool, make_case(SHAPES[shape]), EP2, make_batch())


@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean_of_means", "per_token"])
def test_uneven_loss_masks_equal_reference(pool, is_per_token):
    """Rank 1 has no tokens with loss."""
    case = make_case(calculate_per_token_loss=is_per_token, **LOSSES["all_at_once_sigmoid"], moe_z_loss_coeff=0.02)
    check_against_reference(pool, case, EP2, masked_batch([6, 0, 4, 0]))


def test_three_microbatches_equal_reference(pool):
    check_against_reference(pool, make_case(**LOSSES["all_at_once"]), EP2, make_batch(6))


def test_micro_batch_of_two_equals_reference(pool):
    layout = dataclasses.replace(EP2, micro_batch_size=2)
    check_against_reference(pool, make_case(**LOSSES["all_at_once"]), layout, make_batch())


@pytest.mark.parametrize(
    "changes",
    [
        {"overlap_grad_reduce": True, "bucket_size": 100},
        {"overlap_grad_reduce": True, "bucket_size": 1, "dispatcher": "allgather"},
        {"average_in_collective": True},
    ],
    ids=["small_buckets", "bucket_per_parameter", "average_in_collective"],
)
def test_gradient_buffer_options_equal_reference(pool, changes):
    layout = dataclasses.replace(EP2, **changes)
    got = check_against_reference(pool, make_case(), layout, make_batch(), plan=PLANS["all_to_rank0"])
    assert compare_logs(got.logs) == []


def fp32_bound(num_terms):
    """50 eps sqrt(terms): rounding errors of a sum of `num_terms` products add up like a random walk."""
    return 50 * torch.finfo(torch.float32).eps * num_terms**0.5


@pytest.mark.parametrize("plan", [None, "all_to_rank0"])
def test_grouped_experts_equal_reference(pool, plan):
    layout = dataclasses.replace(EP2, is_grouped=True)
    check_against_reference(pool, make_case(), layout, make_batch(), plan=PLANS.get(plan))


@pytest.mark.parametrize(
    ("layout", "plan"), [(EP2, None), (EP2, "none_to_2"), (EP2_ALLGATHER, "all_to_rank0")], ids=str
)
def test_grouped_experts_in_fp32_equal_reference(pool, layout, plan):
    layout = dataclasses.replace(layout, is_grouped=True, dtype=torch.float32)
    num_terms = 4 * SEQ_LENGTH * 8  # an element of a weight gradient sums over tokens, each a sum over the width
    case, forced = make_case(), PLANS.get(plan)
    check_against_reference(pool, case, layout, make_batch(), plan=forced, tolerance=fp32_bound(num_terms))


def test_three_sgd_steps_end_with_equal_weights_in_both_layouts(pool):
    case = make_case(**ROUTERS["sigmoid_bias"], moe_aux_loss_coeff=0.05)
    batch = make_batch()
    weights = make_weights(case.config(Layout()), case.shape, seed=3)
    options = {"steps": 3, "clip_grad": 0.5, "learning_rate": 0.3}
    one = run_step(pool, case, Layout(), batch, weights, **options)
    two = run_step(pool, case, EP2, batch, weights, **options)
    moved = max(float((one.params[name] - weights[name]).abs().max()) for name in weights)
    assert moved > 0.01
    one.grads, two.grads = one.params, two.params
    assert_matches(one, two)


# Sinkhorn chooses by its own balanced matrix; nothing forces its choice.
ROUTERS_AND_LOADS = [
    (router, plan) for router in ROUTERS for plan in (None, *PLANS) if plan is None or "sinkhorn" not in router
]


@pytest.mark.full
@pytest.mark.parametrize("layout", [EP2, EP2_ALLGATHER, EP2_FLEX, EP2_DP4, EP4, EP4_ALLGATHER, EP4_FLEX], ids=str)
@pytest.mark.parametrize(("router", "plan"), ROUTERS_AND_LOADS)
def test_every_router_and_load_in_every_layout(pool, layout, router, plan):
    topk = ROUTERS[router].get("moe_router_topk", TOPK)
    forced = PLANS.get(plan)
    if forced is not None and topk != TOPK:
        forced = dataclasses.replace(forced, topk=topk)
    check_against_reference(pool, make_case(**ROUTERS[router]), layout, make_batch(), plan=forced, **options_of(router))


@pytest.mark.full
@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean_of_means", "per_token"])
@pytest.mark.parametrize("capacity", [None, *CAPACITIES])
@pytest.mark.parametrize("layout", [DP2, EP2, EP2_ALLGATHER, EP2_FLEX, EP2_DP4, EP4], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_and_capacity_in_every_layout(pool, layout, loss, capacity, is_per_token):
    changes = CAPACITIES.get(capacity, {}) | LOSSES[loss]
    case = make_case(calculate_per_token_loss=is_per_token, **changes)
    check_against_reference(pool, case, layout, masked_batch([6, 1, 3, 2, 5, 6, 0, 4], num_samples=8))
