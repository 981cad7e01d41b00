"""Whole training steps on the stand-in for Transformer Engine against the fp64 reference, in several layouts."""

import dataclasses

import pytest
import torch

from tests.common.engine_runs import checked_job, engine_on_ranks
from tests.common.layouts import Layout, run_step
from tests.common.reference import make_weights
from tests.common.reference_model import GptShape
from tests.unit_tests.core.stream_check.cases import DELAYED, FP8
from tests.unit_tests.layouts.cases import EP2, SEQ_LENGTH, check_against_reference, make_batch, make_case
from tests.unit_tests.layouts.test_checkpoint_matrix import WIDE

SHAPE = GptShape(16, SEQ_LENGTH)
FIELDS = {"num_query_groups": 2, "moe_shared_expert_intermediate_size": 4, "moe_shared_expert_gate": True}
TP2_SP = Layout(tp=2, is_sequence_parallel=True, micro_batch_size=2)
GROUPED = dataclasses.replace(EP2, is_grouped=True)
OVERLAPPED = dataclasses.replace(GROUPED, overlap=True, delays_wgrad=True)
ZERO = {"overlap_grad_reduce": True, "bucket_size": 100, "use_distributed_optimizer": True}
LAYOUTS = [
    Layout(),
    dataclasses.replace(EP2, fuses_wgrad=False),
    TP2_SP,
    GROUPED,
    dataclasses.replace(OVERLAPPED, **ZERO),
    Layout(is_grouped=True, recompute=("uniform", "1")),
    Layout(is_grouped=True, recompute=("layernorm", "core_attn", "moe_act")),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_equals_reference(pool, monkeypatch, layout):
    engine_on_ranks(monkeypatch)
    got = check_against_reference(pool, make_case(SHAPE, **FIELDS), layout, make_batch())
    assert (got.counters["wgrads deferred"] > 0) == layout.delays_wgrad


def test_dense_step_over_tensor_parallel_ranks_equals_reference(pool, monkeypatch):
    engine_on_ranks(monkeypatch)
    case = make_case(SHAPE, num_moe_experts=None, moe_layer_freq=1, num_query_groups=2)
    check_against_reference(pool, case, dataclasses.replace(TP2_SP, is_sequence_parallel=False), make_batch())


@pytest.mark.parametrize("experts", [{"num_moe_experts": None, "moe_layer_freq": 1}, {}], ids=["dense", "experts"])
def test_biases_and_layer_norm_are_those_of_the_local_implementation(pool, monkeypatch, experts):
    changes = {"add_bias_linear": True, "normalization": "LayerNorm", "gated_linear_unit": False, "num_query_groups": 2}
    engine_on_ranks(monkeypatch)
    case = make_case(SHAPE, **changes, activation_func=torch.nn.functional.gelu, **experts)
    check_against_reference(pool, case, TP2_SP if experts else GROUPED, make_batch())


def test_fp32_differs_from_local_by_rounding_alone(pool, monkeypatch):
    layout = dataclasses.replace(GROUPED, dtype=torch.float32)
    case = make_case(SHAPE, **FIELDS)
    arguments = case, layout, make_batch(), make_weights(case.config(Layout()), case.shape, seed=3)
    local = run_step(pool, *arguments, steps=2)
    engine_on_ranks(monkeypatch)
    got = run_step(pool, *arguments, steps=2)
    for name, expected in (local.grads | local.params).items():
        torch.testing.assert_close((got.grads | got.params)[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "fp8",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"fp8_recipe": "delayed"},
        pytest.param({"fp8_recipe": "blockwise"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_hiding_the_exchange_and_delaying_weight_gradients_change_no_bit(pool, monkeypatch, fp8):
    engine_on_ranks(monkeypatch)
    case = make_case(
        SHAPE,
        **FIELDS | WIDE | {"moe_shared_expert_intermediate_size": 16},
        **({"fp8": "hybrid", **fp8} if fp8 else {}),
    )
    layout = dataclasses.replace(OVERLAPPED, dtype=torch.bfloat16)
    weights = make_weights(case.config(layout), case.shape, seed=3)
    variants = {"overlap": False, "delays_wgrad": False}, {"delays_wgrad": False}, {}
    plain, *others = (
        run_step(pool, case, dataclasses.replace(layout, **variant), make_batch(), weights, steps=2)
        for variant in variants
    )
    for other in others:
        assert [name for name, grad in plain.grads.items() if not torch.equal(grad, other.grads[name])] == []
        assert [name for name, param in plain.params.items() if not torch.equal(param, other.params[name])] == []


@pytest.mark.parametrize("fp8", [pytest.param((), marks=pytest.mark.full), FP8], ids=["bf16", "fp8"])
def test_streams_and_lifetimes_are_silent(pool, fp8):
    widths = ("--moe-ffn-hidden-size", "16", "--seq-length", "16", "--max-position-embeddings", "16")
    assert pool.run(checked_job, [*DELAYED, *widths, *fp8], world_size=2)[0] == ""
