"""One training step, split over TP, SP, EP, ETP and DP, against the fp64 reference: loss, gradients, norm, counters."""

import pytest
import torch.nn.functional as F

from tests.common.collective_log import compare_logs
from tests.common.forced_router import all_to_rank, none_to_expert
from tests.common.layouts import Layout
from tests.common.reference_model import GptShape
from tests.unit_tests.layouts.cases import (
    NUM_EXPERTS,
    SEQ_LENGTH,
    TOPK,
    check_against_reference,
    make_batch,
    make_case,
    masked_batch,
)

VOCAB_SIZE = 16
HEADS = {"num_attention_heads": 4, "num_query_groups": 4}
DENSE = HEADS | {"num_moe_experts": None, "moe_layer_freq": 1}
MODELS = {
    "modern": (GptShape(VOCAB_SIZE, SEQ_LENGTH), DENSE | {"qk_layernorm": True, "num_query_groups": 2}),
    "biased_tied": (
        GptShape(
            VOCAB_SIZE,
            SEQ_LENGTH,
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=True,
        ),
        DENSE
        | {
            "add_bias_linear": True,
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "activation_func": F.gelu,
        },
    ),
}
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.05, 0.04, 0.03],
    "moe_z_loss_coeff": 0.02,
}
EXPERTS = HEADS | LOSSES | {"moe_shared_expert_intermediate_size": 4, "moe_shared_expert_gate": True}
SHAPE = GptShape(VOCAB_SIZE, SEQ_LENGTH)

TP2 = Layout(tp=2)
TP2_SP = Layout(tp=2, is_sequence_parallel=True)
TP2_SP_DP2 = Layout(tp=2, is_sequence_parallel=True, dp=2)
CAPACITIES = {
    "drop": {"moe_expert_capacity_factor": 0.75},
    "pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
}


def moe(tp=2, dp=1, **changes):
    """A layout of a MoE model; with TP the sequence is split."""
    return Layout(tp=tp, dp=dp, is_sequence_parallel=tp > 1, **changes)


MOE_LAYOUTS = [
    moe(etp=1),
    moe(ep=2, etp=1),
    moe(dp=2, ep=2, etp=2),
    moe(dp=2, ep=2, etp=2, is_grouped=True),
]
"""Softmax routers; more layouts, with sigmoid routers and biases, are in `grid`."""


@pytest.mark.parametrize(
    ("model", "layout"), [("modern", TP2_SP), ("biased_tied", TP2), ("biased_tied", TP2_SP_DP2)], ids=str
)
def test_dense_model_equals_reference(pool, model, layout):
    shape, fields = MODELS[model]
    got = check_against_reference(pool, make_case(shape, **fields), layout, make_batch())
    assert compare_logs(got.logs) == []


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=str)
def test_moe_model_equals_reference(pool, layout):
    got = check_against_reference(pool, make_case(SHAPE, **EXPERTS), layout, make_batch())
    assert compare_logs(got.logs) == []


def test_shared_experts_without_gate_equal_reference(pool):
    case = make_case(SHAPE, **HEADS, moe_shared_expert_intermediate_size=4)
    check_against_reference(pool, case, moe(ep=2, etp=1), make_batch(2))


@pytest.mark.parametrize("plan", [all_to_rank(0, 2, NUM_EXPERTS, TOPK), none_to_expert(2, NUM_EXPERTS, TOPK)], ids=str)
def test_uneven_load_of_split_experts_equals_reference(pool, plan):
    check_against_reference(pool, make_case(SHAPE, **HEADS), moe(dp=2, ep=2, etp=2), make_batch(), plan=plan)


@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean_of_means", "per_token"])
def test_uneven_loss_masks_equal_reference(pool, is_per_token):
    case = make_case(SHAPE, **EXPERTS, calculate_per_token_loss=is_per_token)
    check_against_reference(pool, case, moe(dp=2, ep=2, etp=1), masked_batch([6, 1, 0, 2]))


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_capacity_of_each_rank_equals_reference(pool, capacity):
    case = make_case(SHAPE, **HEADS, **CAPACITIES[capacity])
    check_against_reference(pool, case, moe(ep=2, etp=1), make_batch(2))


def every_moe_layout():
    """All TP up to 2 with EP, ETP, DP on up to 4 ranks, both dispatchers."""
    for tp, dp, ep, etp in ((t, d, e, x) for t in (1, 2) for d in (1, 2, 4) for e in (1, 2, 4) for x in (1, 2, 4)):
        if tp * dp <= 4 and (tp * dp) % (ep * etp) == 0 and max(tp, etp) > 1:
            for dispatcher in ("alltoall", "allgather", "flex"):
                yield moe(tp, dp, ep=ep, etp=etp, dispatcher=dispatcher)


@pytest.mark.full
@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean_of_means", "per_token"])
@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["whole_sequence", "sequence_parallel"])
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("model", MODELS)
def test_dense_model_in_every_layout_equals_reference(pool, model, tp, dp, is_sequence_parallel, is_per_token):
    shape, fields = MODELS[model]
    layout = Layout(tp=tp, dp=dp, is_sequence_parallel=is_sequence_parallel, overlap_grad_reduce=dp > 1)
    case = make_case(shape, **fields, calculate_per_token_loss=is_per_token)
    check_against_reference(pool, case, layout, masked_batch([6, 1, 0, 2]))


@pytest.mark.full
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("layout", [*every_moe_layout()], ids=str)
def test_capacity_in_every_layout_equals_reference(pool, layout, capacity):
    case = make_case(SHAPE, **HEADS, **CAPACITIES[capacity])
    check_against_reference(pool, case, layout, make_batch())
