"""Steps cut into pipeline stages equal the fp64 reference: loss, every gradient, norm, counters."""

import pytest
import torch

from tests.common.collective_log import compare_logs
from tests.common.layouts import Layout, run_step
from tests.common.pool import RankErrors
from tests.common.reference import make_weights
from tests.common.reference_model import GptShape
from tests.unit_tests.layouts.cases import (
    SEQ_LENGTH,
    check_against_reference,
    make_batch,
    make_case,
    masked_batch,
)
from tests.unit_tests.layouts.test_recompute_sweep import assert_same

EVEN_VOCAB_SIZE = 14
"""Rows that two TP ranks share."""

PP1 = Layout()
PP2 = Layout(pp=2)
PP4 = Layout(pp=4)
PP2_VPP2 = Layout(pp=2, vpp=2)
PP2_TP2 = Layout(pp=2, tp=2, is_sequence_parallel=True)
PP2_EP2 = Layout(pp=2, dp=2, ep=2)
LAYOUTS = [PP2, PP4, PP2_VPP2, PP2_TP2, PP2_EP2]
SHAPES = {
    "untied": GptShape(EVEN_VOCAB_SIZE, SEQ_LENGTH),
    "tied": GptShape(EVEN_VOCAB_SIZE, SEQ_LENGTH, share_embeddings_and_output_weights=True),
    "tied_learned_positions": GptShape(
        EVEN_VOCAB_SIZE, SEQ_LENGTH, "learned_absolute", share_embeddings_and_output_weights=True
    ),
}
BALANCED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
    "moe_aux_loss_coeff": 0.01,
}
FIELDS = {
    "alternating": {"moe_layer_freq": [0, 1, 0, 1], "moe_aux_loss_coeff": 0.01},
    "moe_on_first_stage": {"moe_layer_freq": [1, 0, 0, 0], **BALANCED},
    "moe_on_last_stage": {"moe_layer_freq": [0, 0, 0, 1], **BALANCED},
    "dense": {"num_moe_experts": None, "moe_layer_freq": 1},
    "per_token_loss": {"moe_layer_freq": [1, 0, 0, 1], "calculate_per_token_loss": True, "moe_z_loss_coeff": 1e-3},
}
VARIANTS = {
    "blocking_messages": {"overlap_p2p": False},
    "overlapped_reduction": {"overlap_grad_reduce": True, "bucket_size": 100},
    "sharded_optimizer": {"use_distributed_optimizer": True},
    "sharded_overlapped": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 100,
    },
}


def deep_case(shape="untied", fields="alternating"):
    return make_case(SHAPES[shape], num_layers=4, num_query_groups=2, **FIELDS[fields])


def with_fields(layout, **changes):
    return Layout(**{name: getattr(layout, name) for name in Layout.__dataclass_fields__} | changes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stages_equal_reference(pool, layout):
    got = check_against_reference(pool, deep_case("tied"), layout, make_batch())
    assert compare_logs(got.logs) == []


@pytest.mark.parametrize(("layout", "fields"), [*zip((PP2, PP2_VPP2) * 3, FIELDS, strict=False)], ids=str)
def test_kinds_of_layers_may_stand_anywhere(pool, layout, fields):
    check_against_reference(pool, deep_case(fields=fields), layout, masked_batch([6, 1, 0, 3]))


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_any_number_of_microbatches_fits_1f1b(pool, num_microbatches):
    check_against_reference(pool, deep_case("tied_learned_positions"), PP2, make_batch(num_microbatches))


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_ways_to_reduce_and_send_change_nothing(pool, variant):
    layout = with_fields(PP2_VPP2, **({"dp": 2} | VARIANTS[variant]))
    check_against_reference(pool, deep_case("tied"), layout, make_batch())


@pytest.mark.parametrize("layout", [PP2, pytest.param(PP2_VPP2, marks=pytest.mark.full)], ids=str)
def test_stages_in_fp8_have_the_bits_of_one_rank(pool, layout):
    """The first and the last layer of the model, not of a stage, stay in bf16."""
    sizes = {"hidden_size": 32, "ffn_hidden_size": 32, "moe_ffn_hidden_size": 16, "first_last_layers_bf16": True}
    case = make_case(num_layers=4, moe_layer_freq=[0, 1, 1, 1], fp8="hybrid", fp8_recipe="tensorwise", **sizes)
    weights = make_weights(case.config(with_fields(PP1, dtype=torch.bfloat16)), case.shape, seed=3)
    one, cut = (
        run_step(pool, case, with_fields(chosen, dtype=torch.bfloat16), make_batch(), weights)
        for chosen in (PP1, layout)
    )
    assert_same(one, cut)


@pytest.mark.parametrize("text", ["Ettt|tL", "E|t|tt|tL", "Et|tt||tL"])
def test_uneven_stages_equal_reference(pool, text):
    check_against_reference(pool, deep_case("tied"), Layout(pp=2, pipeline_layout=text), make_batch())


# Expert parallelism without experts is refused.
LAYOUTS_AND_FIELDS = [
    (layout, fields) for layout in LAYOUTS for fields in FIELDS if (layout.ep, fields) != (2, "dense")
]


@pytest.mark.full
@pytest.mark.parametrize("variant", ["plain", *VARIANTS])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("layout", "fields"), LAYOUTS_AND_FIELDS, ids=str)
def test_whole_matrix_equals_reference(pool, layout, shape, fields, variant):
    layout = with_fields(layout, **VARIANTS.get(variant, {}))
    check_against_reference(pool, deep_case(shape, fields), layout, masked_batch([6, 1, 0, 3]))


GROUPS_OF_THREE = Layout(pp=2, vpp=2, group_size=3)


@pytest.mark.full
@pytest.mark.parametrize("num_microbatches", [3, 5, 6, 8, 9])
def test_groups_of_three_equal_reference(pool, num_microbatches):
    check_against_reference(pool, deep_case(), GROUPS_OF_THREE, make_batch(num_microbatches))


@pytest.mark.full
@pytest.mark.parametrize(("num_microbatches", "fitting"), [(4, "3 or 5"), (7, "6 or 8")])
def test_a_last_group_smaller_than_the_pipeline_is_refused_on_every_rank(pool, num_microbatches, fitting):
    with pytest.raises(RankErrors, match=f"the last group has 1 microbatches .* use {fitting} microbatches") as caught:
        check_against_reference(pool, deep_case(), GROUPS_OF_THREE, make_batch(num_microbatches))
    assert [name for name, _ in caught.value.errors.values()] == ["ConfigError"] * 2
