"""Single layers and models on the stand-in for Transformer Engine: FP8, what is kept, names, delayed gradients."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from megatron.core import parallel_state
from megatron.core.errors import ConfigError
from megatron.core.extensions.transformer_engine.linear import TEColumnParallelLinear
from megatron.core.fp8.layer_state import GRADIENT, INPUT, WEIGHT, forget_weight_codes
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.module_api.sharded_state import sharded_model_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.grouped_mlp import GroupedMLP
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from tests.common import fake_te_fp8, overlapped_model
from tests.common.engine_runs import engine, local_name
from tests.common.moe_layers import moe_config
from tests.common.small_models import SWIGLU, normal, random_tokens, small_config
from tests.unit_tests.core.pipeline_parallel.overlap.test_saved_inputs import saved_by_autograd, storage_of

FP8 = {"bf16": True, "fp8": "hybrid", "normalization": "RMSNorm", **SWIGLU}


def build(config, spec):
    return GPTModel(config, spec(config), vocab_size=32, max_sequence_length=16)


def loss_of(model):
    tokens, positions, labels = random_tokens()
    return model(tokens, positions, None, labels=labels).float().mean()


def keys_of(model):
    return {(box.key, box.global_shape, box.global_offset) for box in sharded_model_state(model, model.config)}


@pytest.mark.parametrize(
    "fields", [{}, FP8 | {"fp8_recipe": "delayed"}, {"normalization": "RMSNorm"}], ids=["bf16", "fp8", "rms"]
)
@pytest.mark.parametrize("make", [small_config, moe_config])
def test_checkpoint_has_the_keys_of_the_local_implementation(make, fields):
    config = make(num_layers=2, moe_grouped_gemm=True, ffn_hidden_size=32, **fields)
    with engine() as spec:
        model = build(config, spec)
    local = build(config, get_gpt_decoder_block_spec)
    assert keys_of(model) == keys_of(local)
    weights = {local_name(name): param for name, param in model.named_parameters()}
    assert all(torch.equal(param, weights[name]) for name, param in local.named_parameters())


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("fields", [{}, {"num_moe_experts": 4, "moe_grouped_gemm": True, "moe_ffn_hidden_size": 32}])
def test_fp8_model_learns(recipe, fields):
    config = small_config(**FP8, fp8_recipe=recipe, **fields)
    with engine() as spec:
        model = build(config, spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(8):
            forget_weight_codes([model])
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for module in model.modules():
                if getattr(module, "amax_history", None) is not None:
                    module.apply_step_amaxes(module.step_amaxes())
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert fake_te_fp8.REGIONS.num_advanced == 0


def test_amaxes_of_a_step_cover_its_microbatches_and_scale_the_next():
    with engine() as spec:
        layer = (
            build(small_config(**FP8, fp8_recipe="delayed", ffn_hidden_size=64), spec).decoder.layers[0].mlp.linear_fc2
        )
        for size in (2.0, 7.0, 3.0):
            rows = torch.full((16, 64), size, dtype=torch.bfloat16, requires_grad=True)
            layer(rows)[0].backward(torch.full((16, 32), size / 4, dtype=torch.bfloat16))
        found = layer.fp8.step_amaxes().clone()
        assert found[[INPUT, GRADIENT]].tolist() == [7.0, 1.75]
        assert found[WEIGHT] == layer.weight.abs().amax()
        layer.fp8.apply_step_amaxes(found)
        assert layer.fp8.amax_history[0].tolist() == found.tolist()
        layer.fp8.forget_weight()
        layer(rows)
    assert layer.engine.fp8_meta["scaling_fwd"].scale[0] == 448 / 7.0
    assert layer.engine.fp8_meta["scaling_bwd"].scale[0] == 57344 / 1.75


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"moe_grouped_gemm": False},
        {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
        {"fp8": "hybrid", "fp8_recipe": "delayed", "moe_grouped_gemm": False},
        {"fp8": "hybrid", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0},
        {"fp8": "hybrid", "moe_layer_freq": [0, 1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
def test_declaration_of_what_autograd_keeps_is_true(monkeypatch, is_shuffled, fields):
    fields = {"hidden_size": 32, "ffn_hidden_size": 32, "bf16": True, **fields}
    with engine() as spec:
        monkeypatch.setattr(overlapped_model, "get_gpt_decoder_block_spec", spec)
        model = overlapped_model.overlapped_model(is_shuffled=is_shuffled, **fields)
        for layer in model.decoder.layers:
            assert saved_by_autograd(layer, normal(8, 2, 32, dtype=torch.bfloat16)) == layer.saved_inputs()


@pytest.mark.parametrize(("fp8", "kept"), [(None, True), ("hybrid", False)])
def test_rows_that_arrive_padded_are_kept_exactly_in_bf16(fp8, kept):
    config = moe_config(moe_grouped_gemm=True, bf16=True, fp8=fp8, fp8_recipe="blockwise", ffn_hidden_size=32)
    with engine() as spec:
        experts = build(config, spec).decoder.layers[0].mlp.experts
        experts.given_row_multiple = 128
        rows, saved = normal(256, 16, dtype=torch.bfloat16).requires_grad_(), set()
        with saved_tensors_hooks(lambda tensor: saved.add(storage_of(tensor)) or tensor, lambda tensor: tensor):
            experts(rows, torch.tensor([128, 0, 128, 0]), normal(256).abs().to(torch.bfloat16))
    assert (storage_of(rows) in saved) == experts.saves_rows == kept


def test_an_expert_in_sequence_without_tokens_gets_gradients_of_zero():
    with engine() as spec:
        expert = build(moe_config(), spec).decoder.layers[0].mlp.experts.local_experts[0]
        output, _ = expert(normal(0, 16).requires_grad_())
        output.sum().backward()
    assert output.shape == (0, 16)
    assert expert.linear_fc1.weight.grad.eq(0).all()


def test_grouped_experts_without_tokens_get_gradients_of_zero_and_rows_behind_are_zero():
    config = moe_config(moe_grouped_gemm=True)
    with engine() as spec:
        experts = build(config, spec).decoder.layers[0].mlp.experts
        assert isinstance(experts, GroupedMLP)
        rows = normal(7, 16).requires_grad_()
        output, _ = experts(rows, torch.tensor([0, 4, 0, 1]), normal(7).abs())
        output.sum().backward()
    assert output[5:].eq(0).all()
    assert rows.grad[5:].eq(0).all()
    assert [experts.linear_fc1.weights[i].grad.abs().sum() > 0 for i in range(4)] == [False, True, False, True]


def test_grouped_experts_without_any_tokens_get_gradients_of_zero():
    with engine() as spec:
        experts = build(moe_config(moe_grouped_gemm=True), spec).decoder.layers[0].mlp.experts
        output, _ = experts(normal(0, 16).requires_grad_(), torch.zeros(4, dtype=torch.int64), normal(0))
        output.sum().backward()
    assert all(weight.grad.eq(0).all() for weight in (*experts.linear_fc1.weights, *experts.linear_fc2.weights))


def test_experts_that_need_counts_on_the_host_cannot_be_captured():
    with engine() as spec:
        experts = build(moe_config(moe_grouped_gemm=True), spec).decoder.layers[0].mlp.experts
        (blocker,) = experts.graph_capture_blockers()
    assert "moe-pad-expert-input-to-capacity" in blocker


def test_attention_with_a_mask_is_that_of_the_local_implementation():
    with engine() as spec:
        model = build(small_config(), spec)
        attention = model.decoder.layers[0].self_attention.core_attention
        query, key, value = (normal(6, 2, 4, 8, seed=seed) for seed in range(3))
        local = build(small_config(), get_gpt_decoder_block_spec).decoder.layers[0].self_attention.core_attention
        mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
        mask[..., 4, :2] = True
        for given in (None, mask):
            torch.testing.assert_close(attention(query, key, value, given), local(query, key, value, given))


def context_parallel_arguments():
    """Job: what the library's attention is given on a rank that shares its sequences."""
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    config = small_config(context_parallel_size=2, cp_comm_type=["p2p", "a2a"])
    with engine() as spec:
        layers = build(config, spec).decoder.layers
    found = [layer.self_attention.core_attention._engine.args for layer in layers]
    assert all(args.cp_group is parallel_state.get_context_parallel_group() for args in found)
    with pytest.raises(ConfigError, match="context_parallel_size above 1: it takes no mask"):
        layers[0].self_attention.core_attention(normal(4, 1, 4, 8), None, None, torch.zeros(1))
    return [(args.cp_global_ranks, args.cp_comm_type, args.qkv_format) for args in found]


def test_attention_shares_sequences_as_the_configuration_says(pool):
    for found in pool.run(context_parallel_arguments, world_size=2):
        assert found == [([0, 1], "p2p", "sbhd"), ([0, 1], "a2a", "sbhd")]


def test_attention_backend_becomes_the_variables_of_the_library(monkeypatch):
    variables = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    monkeypatch.setattr(os, "environ", {"NVTE_UNFUSED_ATTN": "1"})
    with engine() as spec:
        spec(small_config(attention_backend="fused"))
    assert [os.environ[name] for name in variables] == ["0", "1", "1"]


def test_plain_scores_and_an_fp32_residual_stream_use_our_modules():
    with engine() as spec:
        layer = spec(
            small_config(bf16=True, apply_query_key_layer_scaling=True, fp32_residual_connection=True)
        ).layer_specs[0]
    attention = layer.submodules.self_attention.submodules
    assert attention.core_attention is DotProductAttention
    assert layer.submodules.input_layernorm is WrappedTorchNorm
    assert attention.linear_qkv is TEColumnParallelLinear
