"""One training step whose sequences are spread over CP ranks, with TP, SP, EP, DP and ZeRO, against the reference."""

import dataclasses

import pytest
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
from tests.unit_tests.layouts.grid import (
    EXPERTS,
    GATHER,
    HEADS,
    SEQ_LENGTH,
    SHAPE,
    UNEVEN,
    VOCAB_SIZE,
    ZERO,
    split,
)

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
COMM_TYPES = ("p2p", "all_gather", "a2a")
CP2, CP2_EP2 = split(cp=2), split(cp=2, ep=2)
LAYOUTS = [
    split(cp=4),
    split(cp=4, ep=2, cp_comm_type="all_gather"),
    split(cp=2, ep=2, pp=2, **GATHER),
]
"""What `grid` has not: four parts of a sequence, and stages."""


def check(pool, case, layout, batch, **options):
    """One step equals the reference, and all ranks communicate alike."""
    got = check_against_reference(pool, case, layout, batch, **options)
    assert compare_logs(got.logs) == []
    return got


@pytest.mark.parametrize(
    ("model", "comm_type"),
    [*(("grouped_heads", name) for name in COMM_TYPES), *((name, "p2p") for name in MODELS if name != "grouped_heads")],
)
def test_dense_model_equals_reference(pool, model, comm_type):
    shape, fields = MODELS[model]
    types = [comm_type, "all_gather"] if model == "one_algorithm_for_each_layer" else comm_type
    check(
        pool,
        make_case(shape, **fields),
        dataclasses.replace(CP2, cp_comm_type=types),
        make_batch(2, seq_length=SEQ_LENGTH),
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_moe_model_equals_reference(pool, layout):
    check(pool, make_case(SHAPE, **EXPERTS), layout, make_batch(4, seq_length=SEQ_LENGTH))


@pytest.mark.parametrize(
    ("layout", "is_per_token"), [(CP2_EP2, False), (split(cp=2, dp=2, ep=2, **ZERO), True)], ids=str
)
def test_uneven_loss_masks_equal_reference(pool, layout, is_per_token):
    case = make_case(SHAPE, **EXPERTS, calculate_per_token_loss=is_per_token)
    check(pool, case, layout, masked_batch(UNEVEN, seq_length=SEQ_LENGTH))


def test_all_tokens_on_experts_of_one_rank_equal_reference(pool):
    plan = all_to_rank(1, 2, NUM_EXPERTS, TOPK)
    check(pool, make_case(SHAPE, **HEADS), CP2_EP2, make_batch(2, seq_length=SEQ_LENGTH), plan=plan)


def test_micro_batch_of_two_equals_reference(pool):
    layout = dataclasses.replace(CP2_EP2, micro_batch_size=2)
    check(pool, make_case(SHAPE, **EXPERTS), layout, make_batch(4, seq_length=SEQ_LENGTH))


def every_layout_of_four():
    """All layouts in which four ranks share a sequence."""
    for size in (split(cp=4, ep=ep, etp=etp) for ep in (1, 2, 4) for etp in (1, 2) if ep * etp <= 4):
        for comm_type in COMM_TYPES[:2]:
            for buffers in ({}, GATHER):
                yield dataclasses.replace(size, cp_comm_type=comm_type, **buffers)


@pytest.mark.full
@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean_of_means", "per_token"])
@pytest.mark.parametrize("layout", [*every_layout_of_four()], ids=str)
def test_sequence_over_four_ranks_equals_reference(pool, layout, is_per_token):
    case = make_case(SHAPE, **EXPERTS, calculate_per_token_loss=is_per_token)
    check(pool, case, layout, masked_batch(UNEVEN, seq_length=SEQ_LENGTH))


@pytest.mark.full
@pytest.mark.parametrize("comm_type", COMM_TYPES)
@pytest.mark.parametrize("model", MODELS)
def test_every_dense_model_equals_reference(pool, model, comm_type):
    test_dense_model_equals_reference(pool, model, comm_type)


@pytest.mark.full
@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["whole_part", "sequence_parallel"])
@pytest.mark.parametrize("comm_type", COMM_TYPES[:2])
@pytest.mark.parametrize("model", MODELS)
def test_dense_model_with_tensor_parallelism_equals_reference(pool, model, comm_type, is_sequence_parallel):
    shape, fields = MODELS[model]
    layout = Layout(tp=2, cp=2, cp_comm_type=comm_type, is_sequence_parallel=is_sequence_parallel)
    check(pool, make_case(shape, **fields), layout, masked_batch(UNEVEN, seq_length=SEQ_LENGTH))
