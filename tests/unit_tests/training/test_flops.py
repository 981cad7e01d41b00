"""The FLOP formula against published models; figures in GFLOP per token at 4096 tokens."""

import dataclasses

import pytest

from megatron.training.flops import FlopsShape, LatentAttentionShape, flops_per_token

MIXTRAL = FlopsShape(
    hidden_size=4096,
    seq_length=4096,
    padded_vocab_size=32000,
    num_attention_heads=32,
    kv_channels=128,
    num_query_groups=8,
    ffn_hidden_size=14336,
    is_gated=True,
    num_dense_layers=0,
    num_moe_layers=32,
    moe_ffn_hidden_size=14336,
    moe_router_topk=2,
)
MIXTRAL_8X22B = dataclasses.replace(
    MIXTRAL,
    hidden_size=6144,
    padded_vocab_size=32768,
    num_attention_heads=48,
    ffn_hidden_size=16384,
    moe_ffn_hidden_size=16384,
    num_moe_layers=56,
)
QWEN3_30B = dataclasses.replace(
    MIXTRAL,
    hidden_size=2048,
    padded_vocab_size=151936,
    num_query_groups=4,
    num_moe_layers=48,
    moe_ffn_hidden_size=768,
    moe_router_topk=8,
)
OLMOE = dataclasses.replace(
    MIXTRAL,
    hidden_size=2048,
    padded_vocab_size=50304,
    num_attention_heads=16,
    num_query_groups=16,
    num_moe_layers=16,
    moe_ffn_hidden_size=1024,
    moe_router_topk=8,
)
DEEPSEEK_V3 = FlopsShape(
    hidden_size=7168,
    seq_length=4096,
    padded_vocab_size=129280,
    num_attention_heads=128,
    kv_channels=128,
    num_query_groups=128,
    ffn_hidden_size=18432,
    is_gated=True,
    num_dense_layers=3,
    num_moe_layers=58,
    moe_ffn_hidden_size=2048,
    moe_router_topk=8,
    shared_expert_size=2048,
    latent_attention=LatentAttentionShape(1536, 512, 128, 64, 128),
)
DEEPSEEK_V3_MTP = dataclasses.replace(DEEPSEEK_V3, num_moe_layers=59, num_mtp_layers=1)


@pytest.mark.parametrize(
    ("shape", "gflop"),
    [
        pytest.param(QWEN3_30B, 23.006, id="qwen3-30b-a3b"),
        pytest.param(DEEPSEEK_V3, 249.8, id="deepseek-v3"),
        pytest.param(DEEPSEEK_V3_MTP, 260.0, id="deepseek-v3-mtp"),
        pytest.param(MIXTRAL, 79.7, id="mixtral-8x7b"),
        pytest.param(MIXTRAL_8X22B, 242.2, id="mixtral-8x22b"),
        pytest.param(OLMOE, 7.87, id="olmoe"),
    ],
)
def test_published_model_costs_the_known_figure(shape, gflop):
    digits = 3 if gflop == 23.006 else 1 if gflop > 50 else 2
    assert round(flops_per_token(shape) / 1e9, digits) == gflop
