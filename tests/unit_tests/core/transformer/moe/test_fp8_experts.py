"""Experts in FP8: rows padded by the dispatch or by the experts, grouped or one expert at a time."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.errors import ConfigError
from megatron.core.fp8.experts import fp8_swiglu_experts
from megatron.core.fp8.recipes import RECIPES
from megatron.core.transformer.moe import grouped_mlp
from megatron.core.transformer.moe.grouped_mlp import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.moe_layers import ep_groups, moe_config, normal
from tests.common.mutants import replaced

SIZES = {"hidden_size": 32, "moe_ffn_hidden_size": 48, "num_moe_experts": 4, "moe_router_topk": 2}


def seed_of(name):
    """One for each product and expert, whatever the experts are called."""
    experts = re.findall(r"local_experts\.(\d+)|weight(\d+)", name)
    return 2 * int("".join(experts[0])) + ("fc2" in name) if experts else 99


def results(recipe, **fields):
    """Output, input gradient, weight gradients and amaxes of one layer on one rank."""
    config = moe_config(**SIZES, params_dtype=torch.float32, fp8_recipe=recipe, **{"fp8": "hybrid"} | fields)
    layer = MoELayer(config)
    with torch.no_grad():
        for name, param in layer.named_parameters():
            param.copy_(normal(*param.shape, seed=seed_of(name)).float() * 0.1)
    hidden = normal(9, 2, 32, seed=1).float().requires_grad_()
    output, _ = layer(hidden)
    output.backward(normal(9, 2, 32, seed=2).float())
    grads = {name: param.grad for name, param in layer.named_parameters()}
    amaxes = {name: buffer for name, buffer in layer.named_buffers() if "amax" in name}
    return {"output": output, "hidden": hidden.grad, **grads, **amaxes}


@pytest.mark.parametrize("dispatcher", [{"moe_token_dispatcher_type": "flex"}, {"moe_permute_fusion": True}], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_padded_by_the_dispatch_equal_rows_padded_by_the_experts(recipe, dispatcher):
    padded_here = results(recipe, moe_grouped_gemm=True)
    padded_there = results(recipe, moe_grouped_gemm=True, **dispatcher)
    for name, want in padded_here.items():
        torch.testing.assert_close(padded_there[name], want, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("fields", [{}, {"moe_grouped_gemm": True}, {"moe_token_dispatcher_type": "flex"}], ids=str)
def test_experts_of_a_recipe_for_dense_layers_have_the_bits_of_a_layer_without_fp8(fields):
    found, plain = results("blockwise", **fields), results("blockwise", **fields | {"fp8": None})
    assert [name for name, want in plain.items() if not torch.equal(found[name], want)] == []


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_output_of_grouped_experts_equals_that_of_experts_in_sequence(recipe):
    grouped, single = (results(recipe, moe_grouped_gemm=is_grouped) for is_grouped in (True, False))
    torch.testing.assert_close(grouped["hidden"], single["hidden"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", [name for name, spec in RECIPES.items() if spec.covers_experts])
def test_both_products_and_swiglu_as_one_step_have_the_bits_of_three(recipe):
    calls = []
    with replaced(grouped_mlp, "fp8_swiglu_experts", lambda *args: calls.append(1) or fp8_swiglu_experts(*args)):
        as_one = results(recipe, moe_grouped_gemm=True)
        with replaced(GroupedMLP, "_is_one_fp8_step", False):
            as_three = results(recipe, moe_grouped_gemm=True)
    assert [name for name, want in as_three.items() if not torch.equal(as_one[name], want)] == []
    assert calls == [1]


def test_step_as_one_is_for_swiglu_in_codes_alone():
    def is_one(**fields):
        config = moe_config(**SIZES, bf16=True, moe_grouped_gemm=True, fp8="hybrid", **fields)
        return MoELayer(config).experts._is_one_fp8_step

    assert is_one()
    for fields in (
        {"fp8_wgrad": False},
        {"bias_swiglu_fusion": False},
        {"activation_func": F.gelu},
        {"gated_linear_unit": False},
        {"add_bias_linear": True},
    ):
        assert not is_one(**fields), fields


def wired_job(dtype, is_grouped):
    """Output and input gradient of this rank's tokens, experts spread over all ranks, rows on the wire in `dtype`."""
    config = moe_config(
        **SIZES,
        params_dtype=torch.float32,
        expert_model_parallel_size=dist.get_world_size(),
        moe_token_dispatcher_type="flex",
        moe_dispatch_fwd_dtype=dtype,
        moe_grouped_gemm=is_grouped,
    )
    layer = MoELayer(config, pg_collection=ep_groups())
    hidden = normal(9, 2, 32, seed=1 + dist.get_rank()).float().requires_grad_()
    output, _ = layer(hidden)
    output.backward(normal(9, 2, 32, seed=5).float())
    return output.detach(), hidden.grad


def test_rows_on_the_wire_in_fp8_change_results_by_their_rounding(pool):
    plain, packed = (pool.run(wired_job, dtype, True, world_size=2) for dtype in ("bf16", "fp8"))
    for wanted, got in zip(plain, packed, strict=True):
        for want, value in zip(wanted, got, strict=True):
            error = float((value - want).norm() / want.norm())
            assert 0 < error < 2.0**-4


def test_rows_on_the_wire_in_fp8_need_the_flex_dispatcher():
    with pytest.raises(
        ConfigError, match=r"moe_dispatch_fwd_dtype='fp8' .*sends rows as they are; use --moe-token-disp"
    ):
        MoELayer(moe_config(**SIZES, moe_dispatch_fwd_dtype="fp8"))
