"""One training step whose sequences are spread over CP ranks, with TP, SP, EP, DP and ZeRO, against the reference."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.common.collective_log import compare_logs
from tests.common.forced_router import all_to_rank
from tests.common.layouts import Layout
from tests.common.reference_model import GptShape
from tests.unit_tests.layouts.cases import (
    NUM_EXPERTS,
    TOPK,
    check_against_reference,
    make_batch,
    make_case,
    masked_batch,
)

SEQ_LENGTH, VOCAB_SIZE = 8, 16
SHAPE = GptShape(VOCAB_SIZE, SEQ_LENGTH)
HEADS = {"num_attention_heads": 4, "num_query_groups": 2}
DENSE = HEADS | {"num_moe_experts": None, "moe_layer_freq": 1}
MODELS = {
    "grouped_heads": (SHAPE, DENSE | {"qk_layernorm": True}),
    "learned_positions": (
        GptShape(
            VOCAB_SIZE,
            SEQ_LENGTH,
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=True,
        ),
        DENSE
        | {
            "num_query_groups": 4,
            "add_bias_linear": True,
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "activation_func": F.gelu,
        },
    ),
    "layer_scaling": (SHAPE, DENSE | {"apply_query_key_layer_scaling": True}),
    "one_algorithm_for_each_layer": (SHAPE, DENSE),
}
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.05, 0.04, 0.03],
    "moe_z_loss_coeff": 0.02,
}
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
EXPERTS = HEADS | LOSSES | BIAS | {"moe_shared_expert_intermediate_size": 4, "moe_shared_expert_gate": True}
ZERO = {"use_distributed_optimizer": True}
OVERLAP = ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 200}
# Tokens with loss in each sample: CP ranks count unlike numbers of them, one none at all.
UNEVEN = [8, 1, 0, 3]
COMM_TYPES = ("p2p", "all_gather", "a2a")


def cp(size=2, tp=1, **changes):
    """A layout in which CP ranks share sequences; with TP the part of a rank is split."""
    return Layout(tp=tp, is_sequence_parallel=tp > 1, cp=size, **changes)


def check(pool, case, layout, batch, **options):
    """One step equals the reference, and all ranks communicate alike."""
    got = check_against_reference(pool, case, layout, batch, **options)
    assert compare_logs(got.logs) == []
    return got


@pytest.mark.parametrize("comm_type", COMM_TYPES)
@pytest.mark.parametrize("model", MODELS)
def test_dense_model_equals_reference(pool, model, comm_type):
    shape, fields = MODELS[model]
    types = [comm_type, "all_gather"] if model == "one_algorithm_for_each_layer" else comm_type
    check(pool, make_case(shape, **fields), cp(cp_comm_type=types), make_batch(2, seq_length=SEQ_LENGTH))


@pytest.mark.parametrize(
    "layout",
    [
        cp(4),
        cp(4, cp_comm_type="all_gather"),
        cp(tp=2, ep=2, etp=1),
        cp(tp=2, ep=4, etp=1, cp_comm_type="all_gather"),
        cp(dp=2, ep=2, **OVERLAP),
        cp(dp=2, ep=4, dispatcher="allgather", cp_comm_type="a2a"),
    ],
    ids=str,
)
def test_moe_model_equals_reference(pool, layout):
    check(pool, make_case(SHAPE, **EXPERTS), layout, make_batch(4, seq_length=SEQ_LENGTH))


@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean_of_means", "per_token"])
@pytest.mark.parametrize("layout", [cp(ep=2), cp(dp=2, ep=2, **ZERO)], ids=str)
def test_uneven_loss_masks_equal_reference(pool, layout, is_per_token):
    case = make_case(SHAPE, **EXPERTS, calculate_per_token_loss=is_per_token)
    check(pool, case, layout, masked_batch(UNEVEN, seq_length=SEQ_LENGTH))


def test_all_tokens_on_experts_of_one_rank_equal_reference(pool):
    plan = all_to_rank(1, 2, NUM_EXPERTS, TOPK)
    check(pool, make_case(SHAPE, **HEADS), cp(ep=2), make_batch(2, seq_length=SEQ_LENGTH), plan=plan)


def test_micro_batch_of_two_equals_reference(pool):
    layout = cp(ep=2, micro_batch_size=2)
    check(pool, make_case(SHAPE, **EXPERTS), layout, make_batch(4, seq_length=SEQ_LENGTH))


def fp32_bound(num_terms):
    """50 eps sqrt(terms): rounding errors of a sum of `num_terms` products add up like a random walk."""
    return 50 * torch.finfo(torch.float32).eps * num_terms**0.5


def test_grouped_experts_in_fp32_equal_reference(pool):
    layout = cp(ep=2, is_grouped=True, dtype=torch.float32)
    bound = fp32_bound(4 * SEQ_LENGTH * 8)
    check(pool, make_case(SHAPE, **EXPERTS), layout, masked_batch(UNEVEN, seq_length=SEQ_LENGTH), tolerance=bound)


def every_layout():
    """CP up to 4 with TP and SP, EP, ETP 1, DP and ZeRO on up to 4 ranks, all algorithms."""
    sizes = [(c, t, d, e) for c in (2, 4) for t in (1, 2) for d in (1, 2) for e in (1, 2, 4)]
    for size, tp, dp, ep in sizes:
        if size * tp * dp <= 4 and size * tp * dp % ep == 0:
            for comm_type in COMM_TYPES:
                if comm_type == "a2a" and size * tp > 2:
                    continue  # two query groups
                for changes in ({}, ZERO, OVERLAP):
                    yield cp(size, tp, dp=dp, ep=ep, etp=1, cp_comm_type=comm_type, **changes)


@pytest.mark.full
@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean_of_means", "per_token"])
@pytest.mark.parametrize("layout", [*every_layout()], ids=str)
def test_moe_model_in_every_layout_equals_reference(pool, layout, is_per_token):
    case = make_case(SHAPE, **EXPERTS, calculate_per_token_loss=is_per_token)
    check(pool, case, layout, masked_batch(UNEVEN, seq_length=SEQ_LENGTH))


@pytest.mark.full
@pytest.mark.parametrize("layout", [x for x in every_layout() if not x.overlap_grad_reduce], ids=str)
def test_grouped_experts_in_fp32_in_every_layout_equal_reference(pool, layout):
    layout = dataclasses.replace(layout, is_grouped=True, dtype=torch.float32)
    bound = fp32_bound(4 * SEQ_LENGTH * 8)
    check(pool, make_case(SHAPE, **EXPERTS), layout, masked_batch(UNEVEN, seq_length=SEQ_LENGTH), tolerance=bound)


@pytest.mark.full
@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["whole_part", "sequence_parallel"])
@pytest.mark.parametrize("comm_type", COMM_TYPES[:2])
@pytest.mark.parametrize("model", MODELS)
def test_dense_model_with_tensor_parallelism_equals_reference(pool, model, comm_type, is_sequence_parallel):
    shape, fields = MODELS[model]
    layout = Layout(tp=2, cp=2, cp_comm_type=comm_type, is_sequence_parallel=is_sequence_parallel)
    check(pool, make_case(shape, **fields), layout, masked_batch(UNEVEN, seq_length=SEQ_LENGTH))
