"""Self attention: layout of QKV, norms per head, rotary embedding, biases."""

import math

import pytest
import torch

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from tests.common.small_models import normal, small_config

S, B, H, D = 5, 2, 32, 8


def build(norm=False, **fields):
    parts = SelfAttentionSubmodules()
    if norm:
        parts = SelfAttentionSubmodules(q_layernorm=WrappedTorchNorm, k_layernorm=WrappedTorchNorm)
    attention = SelfAttention(small_config(**fields), parts, 1, AttnMaskType.causal)
    for seed, param in enumerate(attention.parameters()):
        param.data.copy_(normal(*param.shape, seed=seed) * 0.3)
    return attention


def test_qkv_rows_lie_group_by_group():
    attention = build(num_query_groups=2, add_bias_linear=False)
    x = normal(S, B, H)
    query, key, value = attention.get_query_key_value_tensors(x)
    rows = (x @ attention.linear_qkv.weight.T).view(S, B, 8, D)
    # [q0 q1 k0 v0 | q2 q3 k1 v1]
    assert torch.equal(query, rows[:, :, [0, 1, 4, 5]])
    assert torch.equal(key, rows[:, :, [2, 6]])
    assert torch.equal(value, rows[:, :, [3, 7]])


def test_grouped_heads_equal_repeated_heads():
    grouped, full = build(num_query_groups=2, add_bias_linear=False), build(add_bias_linear=False)
    rows = grouped.linear_qkv.weight.view(8, D, H)
    # q0 k0 v0 q1 k0 v0 q2 k1 v1 q3 k1 v1
    full.linear_qkv.weight.data.copy_(rows[[0, 2, 3, 1, 2, 3, 4, 6, 7, 5, 6, 7]].flatten(0, 1))
    full.linear_proj.weight.data.copy_(grouped.linear_proj.weight)
    x = normal(S, B, H)
    torch.testing.assert_close(grouped(x)[0], full(x)[0], rtol=1e-10, atol=1e-12)


def test_head_norm_acts_on_single_heads_before_rotation():
    attention = build(norm=True, normalization="RMSNorm", num_query_groups=2, add_bias_linear=False)
    plain = build(num_query_groups=2, add_bias_linear=False)
    plain.linear_qkv.weight.data.copy_(attention.linear_qkv.weight)
    x = normal(S, B, H)
    query, key, value = attention.get_query_key_value_tensors(x)
    raw_query, raw_key, raw_value = plain.get_query_key_value_tensors(x)
    for got, raw, norm in ((query, raw_query, attention.q_layernorm), (key, raw_key, attention.k_layernorm)):
        root = torch.sqrt((raw**2).mean(-1, keepdim=True) + 1e-5)
        torch.testing.assert_close(got, raw / root * norm.weight, rtol=1e-10, atol=1e-12)
    assert torch.equal(value, raw_value)


@pytest.mark.parametrize("form", ["angles", "tables"])
def test_rotation_enters_queries_and_keys(form):
    attention = build(num_attention_heads=1, kv_channels=D, add_bias_linear=False)
    rope = RotaryEmbedding(D)
    x = normal(S, 1, H)
    query, key, value = (t[:, 0, 0] for t in attention.get_query_key_value_tensors(x))
    angles = torch.outer(torch.arange(S).double(), 10000.0 ** (-torch.arange(4).double() / 4))

    def turn(t):
        turned = torch.complex(t[:, :4], t[:, 4:]) * torch.polar(torch.ones(()).double(), angles)
        return torch.cat((turned.real, turned.imag), 1)

    scores = (turn(query) @ turn(key).T / math.sqrt(D)).masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    expected = torch.softmax(scores, 1) @ value @ attention.linear_proj.weight.T
    given = rope(S) if form == "angles" else rope.get_tables(S, torch.float64, x.device)
    torch.testing.assert_close(attention(x, None, given)[0][:, 0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "has_qkv_bias", "has_proj_bias"),
    [
        ({"add_bias_linear": True}, True, True),
        ({"add_bias_linear": False}, False, False),
        ({"add_bias_linear": False, "add_qkv_bias": True}, True, False),
    ],
)
def test_bias_switches(fields, has_qkv_bias, has_proj_bias):
    attention = build(**fields)
    assert (attention.linear_qkv.bias is not None) == has_qkv_bias
    assert (attention.linear_proj.bias is not None) == has_proj_bias
    assert (attention(normal(S, B, H))[1] is not None) == has_proj_bias


def test_head_size_is_free_of_the_width():
    attention = build(kv_channels=10, num_query_groups=1)
    assert attention.linear_qkv.weight.shape == ((4 + 2) * 10, H)
    assert attention(normal(S, B, H))[0].shape == (S, B, H)
