"""Recomputed activations: the same step bit for bit, and equal to the reference, however the model is split."""

import dataclasses

import pytest
import torch

from tests.common.forced_router import all_to_rank
from tests.common.layouts import Layout, run_step
from tests.common.reference import make_weights
from tests.unit_tests.layouts.cases import NUM_EXPERTS, TOPK, check_against_reference, make_batch, make_case
from tests.unit_tests.layouts.test_context_parallel_sweep import SEQ_LENGTH, SHAPE
from tests.unit_tests.layouts.test_tensor_parallel_sweep import EXPERTS, MODELS

RECOMPUTE = {
    "uniform1": ("uniform", "1"),
    "uniform2": ("uniform", "2"),
    "uniform3": ("uniform", "3"),
    "block1": ("block", "1"),
    "block9": ("block", "9"),
    "core_attn": ("core_attn",),
    "layernorm": ("layernorm",),
    "mlp": ("mlp",),
    "moe": ("moe",),
    "moe_act": ("moe_act",),
    "shared_experts": ("shared_experts",),
    "all_modules": ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"),
    "all_but_moe": ("core_attn", "layernorm", "mlp", "moe_act", "shared_experts"),
}
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 100, "use_distributed_optimizer": True}
LAYOUTS = {
    "one_rank": Layout(micro_batch_size=2),
    "ep2": Layout(dp=2, ep=2),
    "ep2_zero_delayed": Layout(dp=2, ep=2, is_grouped=True, delays_wgrad=True, overlap_param_gather=True, **OVERLAPPED),
    "ep2_allgather": Layout(dp=2, ep=2, dispatcher="allgather"),
    "tp2_sp_ep2": Layout(tp=2, is_sequence_parallel=True, ep=2, etp=1, delays_wgrad=True),
    "cp2_ep2": Layout(cp=2, ep=2),
    "tp2_sp_dp2_ep2_etp2": Layout(tp=2, is_sequence_parallel=True, dp=2, ep=2, etp=2),
    "pp2": Layout(pp=2, pipeline_layout="Et|ttL"),
    "pp2_vpp2_zero": Layout(pp=2, pipeline_layout="E|t|t|tL", overlap_param_gather=True, **OVERLAPPED),
    "pp2_ep2_grouped_delayed": Layout(pp=2, pipeline_layout="Et|ttL", dp=2, ep=2, is_grouped=True, delays_wgrad=True),
    "pp2_cp2_ep2": Layout(pp=2, pipeline_layout="Et|ttL", cp=2, ep=2),
}
NORMAL = [
    ("one_rank", "uniform1"),
    ("ep2", "uniform3"),
    ("ep2_zero_delayed", "all_but_moe"),
    ("tp2_sp_ep2", "all_modules"),
    ("ep2_allgather", "block1"),
    ("cp2_ep2", "core_attn"),
    ("pp2", "all_modules"),
    ("pp2_vpp2_zero", "uniform1"),
]
FEATURES = {"num_layers": 3, "moe_layer_freq": [0, 1, 1], "moe_router_score_function": "sigmoid"} | EXPERTS
BIAS = {"moe_router_enable_expert_bias": True}
FP8 = {"fp8": "hybrid", "hidden_size": 32} | dict.fromkeys(
    ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32
)


def recomputed(layout, recompute):
    return dataclasses.replace(LAYOUTS[layout], recompute=RECOMPUTE[recompute])


def assert_same(left, right):
    """Everything that a step leaves behind, bit for bit."""
    for kind in ("grads", "params", "routing_maps", "expert_bias"):
        ours, theirs = getattr(left, kind), getattr(right, kind)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [], kind
    assert (left.loss, left.grad_norm, left.aux) == (right.loss, right.grad_norm, right.aux)


def check_cell(pool, layout, recompute, dtype=torch.float64, steps=2, **changes):
    """Some steps with dropout, aux losses and expert bias: equal to those without recompute."""
    changes = {"attention_dropout": 0.0 if LAYOUTS[layout].cp > 1 else 0.1} | changes
    case = make_case(SHAPE, **FEATURES | BIAS | {"hidden_dropout": 0.2} | changes)
    weights, batch = (
        make_weights(case.config(Layout(dtype=dtype)), case.shape, seed=3),
        make_batch(seq_length=SEQ_LENGTH),
    )
    plain, again = (
        run_step(pool, case, dataclasses.replace(chosen, dtype=dtype), batch, weights, steps=steps)
        for chosen in (LAYOUTS[layout], recomputed(layout, recompute))
    )
    assert plain.aux
    assert_same(plain, again)


@pytest.mark.parametrize(("layout", "recompute"), NORMAL)
def test_recompute_changes_no_bit(pool, layout, recompute):
    check_cell(pool, layout, recompute)


@pytest.mark.full
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recompute_changes_no_bit_in_any_layout(pool, layout, recompute):
    check_cell(pool, layout, recompute)


@pytest.mark.parametrize(("layout", "recompute", "recipe"), [("ep2_zero_delayed", "uniform2", "delayed")])
def test_recompute_in_fp8_changes_no_bit(pool, layout, recompute, recipe):
    """Three steps: the second and third take their factors from amaxes of the steps before."""
    check_cell(pool, layout, recompute, dtype=torch.bfloat16, steps=3, fp8_recipe=recipe, **FP8)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("recompute", ["uniform1", "uniform3", "block1", "moe", "all_modules"])
@pytest.mark.parametrize("layout", ["ep2_zero_delayed", "tp2_sp_ep2", "cp2_ep2", "pp2_vpp2_zero", "pp2_cp2_ep2"])
def test_recompute_in_fp8_changes_no_bit_in_any_layout(pool, layout, recompute, recipe):
    check_cell(pool, layout, recompute, dtype=torch.bfloat16, steps=3, fp8_recipe=recipe, **FP8)


@pytest.mark.parametrize(("layout", "recompute"), [("ep2", "uniform2"), ("pp2_vpp2_zero", "uniform1")])
def test_recompute_equals_reference(pool, layout, recompute):
    check_against_reference(
        pool, make_case(SHAPE, **FEATURES), recomputed(layout, recompute), make_batch(seq_length=SEQ_LENGTH)
    )


@pytest.mark.full
@pytest.mark.parametrize("is_forced", [False, True], ids=["chosen", "all_to_rank0"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recompute_equals_reference_in_any_layout(pool, layout, recompute, is_forced):
    plan = all_to_rank(0, 2, NUM_EXPERTS, TOPK) if is_forced else None
    check_against_reference(
        pool, make_case(SHAPE, **FEATURES), recomputed(layout, recompute), make_batch(seq_length=SEQ_LENGTH), plan=plan
    )


@pytest.mark.parametrize("model", MODELS)
def test_distributed_inputs_equal_reference_of_a_dense_model(pool, model):
    shape, changes = MODELS[model]
    layout = Layout(tp=2, recompute=("uniform", "1", "distributed"))
    check_against_reference(pool, make_case(shape, **changes), layout, make_batch())
