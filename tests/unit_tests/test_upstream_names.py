"""The public names of Megatron users exist under their import paths and work together as they do there."""

import importlib

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

NAMES = {
    "megatron.core": ["ModelParallelConfig", "parallel_state"],
    "megatron.core.transformer": ["TransformerConfig"],
    "megatron.core.transformer.transformer_config": ["TransformerConfig"],
    "megatron.core.transformer.transformer_block": ["TransformerBlock", "TransformerBlockSubmodules"],
    "megatron.core.transformer.transformer_layer": ["TransformerLayer", "TransformerLayerSubmodules"],
    "megatron.core.transformer.attention": ["SelfAttention", "SelfAttentionSubmodules"],
    "megatron.core.transformer.mlp": ["MLP", "MLPSubmodules"],
    "megatron.core.transformer.spec_utils": ["ModuleSpec", "build_module"],
    "megatron.core.transformer.moe.moe_layer": ["MoELayer", "MoESubmodules"],
    "megatron.core.transformer.moe.router": ["TopKRouter"],
    "megatron.core.transformer.moe.token_dispatcher": ["MoEAlltoAllTokenDispatcher", "MoEAllGatherTokenDispatcher"],
    "megatron.core.transformer.moe.experts": ["GroupedMLP", "SequentialMLP"],
    "megatron.core.transformer.moe.shared_experts": ["SharedExpertMLP"],
    "megatron.core.models.gpt": ["GPTModel"],
    "megatron.core.models.gpt.gpt_layer_specs": ["get_gpt_decoder_block_spec", "get_gpt_layer_local_spec"],
    "megatron.core.pipeline_parallel": ["get_forward_backward_func"],
    "megatron.core.distributed": ["DistributedDataParallel", "DistributedDataParallelConfig"],
    "megatron.core.parallel_state": [
        "initialize_model_parallel",
        "get_data_parallel_group",
        "get_data_parallel_rank",
        "get_data_parallel_world_size",
        "get_expert_model_parallel_group",
        "get_expert_model_parallel_rank",
        "get_expert_model_parallel_world_size",
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "get_pipeline_model_parallel_rank",
        "get_pipeline_model_parallel_world_size",
        "get_context_parallel_rank",
        "get_context_parallel_world_size",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
        "get_virtual_pipeline_model_parallel_world_size",
        "destroy_model_parallel",
        "model_parallel_is_initialized",
    ],
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in NAMES.items() for name in names])
def test_name_exists_under_its_import_path(path: str, name: str) -> None:
    assert hasattr(importlib.import_module(path), name)


def test_script_of_a_megatron_user_trains() -> None:
    """Configuration, spec, model and optimizer by hand, without arguments, launcher or process group."""
    model_parallel_cuda_manual_seed(123, device="cpu")
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_grouped_gemm=True,
        add_bias_linear=False,
        device="cpu",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config),
        vocab_size=64,
        max_sequence_length=16,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.arange(16).repeat(2, 1)
    losses = []
    for _ in range(8):
        loss = model(tokens, tokens, None, labels=(tokens + 1) % 64).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert model(tokens, tokens, None).shape == (2, 16, 64)
