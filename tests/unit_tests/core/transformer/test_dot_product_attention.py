"""Core attention against its formula."""

import pytest
import torch

from megatron.core.tensor_parallel import random as rng
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from tests.common.small_models import normal, small_config

S, B, N, G, D = 6, 2, 4, 2, 8
Q, K, V = normal(S, B, N, D, seed=1), normal(S, B, G, D, seed=2), normal(S, B, G, D, seed=3)
PADDING = torch.zeros(B, 1, S, S, dtype=torch.bool)
PADDING[1, :, :, 0] = True
PADDING[1, :, 0, 0] = False
BACKENDS = ["auto", "flash", "fused", "unfused", "local", AttnBackend.unfused]


def build(mask_type=AttnMaskType.causal, layer_number=1, **fields):
    return DotProductAttention(small_config(num_query_groups=G, **fields), layer_number, mask_type)


def expected(hidden, scale=8**-0.5):
    """Head by head; `hidden` bool [b, 1, s, s]."""
    outputs = torch.empty(S, B, N, D, dtype=torch.float64)
    for b in range(B):
        for head in range(N):
            key, value = K[:, b, head // (N // G)], V[:, b, head // (N // G)]
            scores = torch.exp(Q[:, b, head] @ key.T * scale).masked_fill(hidden[b, 0], 0.0)
            outputs[:, b, head] = scores / scores.sum(1, keepdim=True) @ value
    return outputs.flatten(2)


LATER = torch.ones(S, S, dtype=torch.bool).triu(1).expand(B, 1, S, S)


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_with_grouped_heads(backend):
    torch.testing.assert_close(build(attention_backend=backend)(Q, K, V), expected(LATER), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_causal_and_given_mask_both_hide(backend):
    got = build(attention_backend=backend)(Q, K, V, PADDING)
    torch.testing.assert_close(got, expected(LATER | PADDING), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_arbitrary_mask_stands_alone(backend):
    got = build(AttnMaskType.arbitrary, attention_backend=backend)(Q, K, V, PADDING)
    torch.testing.assert_close(got, expected(PADDING), rtol=1e-10, atol=1e-12)


def test_mask_type_of_the_call_wins():
    got = build()(Q, K, V, attn_mask_type=AttnMaskType.padding)
    torch.testing.assert_close(got, expected(torch.zeros_like(PADDING)), rtol=1e-10, atol=1e-12)


def test_softmax_scale_replaces_the_root_of_the_head_size():
    attention = DotProductAttention(small_config(num_query_groups=G), 1, AttnMaskType.causal, softmax_scale=0.5)
    torch.testing.assert_close(attention(Q, K, V), expected(LATER, 0.5), rtol=1e-10, atol=1e-12)


def test_layer_scaling_changes_rounding_only():
    plain, scaled = (build(layer_number=4, apply_query_key_layer_scaling=on) for on in (False, True))
    torch.testing.assert_close(scaled(Q, K, V), plain(Q, K, V), rtol=1e-10, atol=1e-12)


def test_layer_scaling_saves_fp16_scores_from_overflow():
    # Scores of 72 * 72 * 8 / sqrt(8) = 14663 fit fp16; with scale 8 they do not, unless divided by the layer number.
    q = k = torch.full((S, B, G, D), 72.0, dtype=torch.float16)
    v = torch.ones(S, B, G, D, dtype=torch.float16)
    for on in (False, True):
        config = small_config(fp16=True, apply_query_key_layer_scaling=on, attention_backend="unfused")
        output = DotProductAttention(config, 8, AttnMaskType.causal, softmax_scale=3.0)(q, k, v)
        assert output.isfinite().all().item() is on


def test_softmax_of_bf16_scores_is_fp32_inside_either_way():
    q, k, v = (x.bfloat16() for x in (Q, K, V))
    outputs = [
        build(bf16=True, attention_backend="unfused", attention_softmax_in_fp32=on)(q, k, v) for on in (False, True)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_dropout_draws_from_the_tensor_parallel_state(backend):
    rng.reset()
    rng.model_parallel_cuda_manual_seed(3, device="cpu")
    attention = build(attention_dropout=0.5, attention_backend=backend)
    before = torch.get_rng_state()
    first, second = attention(Q, K, V), attention(Q, K, V)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(attention.eval()(Q, K, V), attention(Q, K, V))
    rng.reset()


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_gradients(backend):
    attention = build(attention_backend=backend)
    inputs = [x[:3].clone().requires_grad_() for x in (Q, K, V)]
    assert torch.autograd.gradcheck(lambda *x: attention(*x), inputs)
