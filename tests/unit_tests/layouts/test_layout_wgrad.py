"""Weight gradients added in the GEMM, after it, or after backward: the same step bit for bit, in whole models."""

import dataclasses

import pytest
import torch

from tests.common.forced_router import all_to_rank
from tests.common.layouts import Layout, run_step
from tests.common.reference import make_weights
from tests.common.reference_model import GptShape
from tests.unit_tests.layouts.cases import (
    EP2,
    NUM_EXPERTS,
    SEQ_LENGTH,
    TOPK,
    check_against_reference,
    make_batch,
    make_case,
)

ZERO = {"overlap_grad_reduce": True, "bucket_size": 100, "use_distributed_optimizer": True}
TP2_EP2 = Layout(tp=2, is_sequence_parallel=True, ep=2, etp=1, micro_batch_size=2)
LAYOUTS = {
    "one_rank": Layout(),
    "ep2": EP2,
    "ep2_grouped_zero": dataclasses.replace(EP2, is_grouped=True, **ZERO),
    "tp2_sp_ep2_grouped_overlap": dataclasses.replace(TP2_EP2, is_grouped=True, overlap_grad_reduce=True),
}
SHAPE = GptShape(16, SEQ_LENGTH)
SHARED = {"num_query_groups": 2, "moe_shared_expert_intermediate_size": 4, "moe_shared_expert_gate": True}


def step(pool, layout, plan=None):
    case = make_case(SHAPE, **SHARED)
    weights = make_weights(case.config(Layout()), case.shape, seed=3)
    return run_step(pool, case, layout, make_batch(), weights, plan, steps=2)


@pytest.mark.parametrize(("name", "dtype"), [*zip(LAYOUTS, [torch.float64, torch.bfloat16] * 2, strict=True)], ids=str)
def test_delayed_weight_gradients_change_no_bit(pool, name, dtype):
    layout = dataclasses.replace(LAYOUTS[name], dtype=dtype)
    plan = all_to_rank(0, 2, NUM_EXPERTS, TOPK)  # the experts of rank 1 have no tokens
    plain = step(pool, layout, plan)
    delayed = step(pool, dataclasses.replace(layout, delays_wgrad=True), plan)
    for kind in ("grads", "params"):
        left, right = getattr(plain, kind), getattr(delayed, kind)
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert delayed.grad_norm == plain.grad_norm


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), [*zip(LAYOUTS, [torch.bfloat16, torch.float64] * 2, strict=True)], ids=str)
def test_delayed_weight_gradients_change_no_bit_in_the_other_precision(pool, name, dtype):
    test_delayed_weight_gradients_change_no_bit(pool, name, dtype)


def test_gradients_added_after_the_gemm_equal_reference(pool):
    layout = dataclasses.replace(LAYOUTS["tp2_sp_ep2_grouped_overlap"], fuses_wgrad=False)
    check_against_reference(pool, make_case(SHAPE, **SHARED), layout, make_batch())


def test_the_flag_without_fusion_rounds_products_in_half_precision(pool):
    layout = dataclasses.replace(EP2, dtype=torch.bfloat16)
    fused = step(pool, layout).grads["decoder.layers.0.mlp.linear_fc1.weight"]
    rounded = step(pool, dataclasses.replace(layout, fuses_wgrad=False)).grads["decoder.layers.0.mlp.linear_fc1.weight"]
    assert not torch.equal(fused, rounded)
    torch.testing.assert_close(fused, rounded, rtol=2**-7, atol=1e-3)
