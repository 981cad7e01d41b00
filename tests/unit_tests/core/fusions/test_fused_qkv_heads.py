"""The kernels that make heads of the QKV product, interpreted, against the plain form in fp64."""

import pytest
import torch

from megatron.core.fusions import fused_qkv_heads, fused_rope
from megatron.core.fusions.fused_norm import rms_norm
from megatron.core.fusions.fused_qkv_heads import (
    HeadNorms,
    _heads_backward_kernel,
    _heads_kernel,
    kernel_heads,
    kernel_heads_backward,
)
from megatron.core.fusions.fused_rope import RotaryTables, apply_rotary
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from tests.common.compiled import compiled_for_hopper
from tests.common.mutants import replaced
from tests.common.small_models import normal, small_config

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}
"""Twice the relative error of one rounding; in fp32 there are a few."""
# (s, b, g, r, c, d): slice A's heads, one head in all, partly turned, sizes that are no powers of two, no tokens
SHAPES = [(3, 2, 2, 8, 128, 128), (1, 1, 1, 1, 2, 2), (5, 1, 3, 2, 20, 12), (2, 3, 1, 3, 10, 4), (0, 1, 2, 2, 8, 8)]


def problem(shape, dtype, interleaved=False, has_norm=True, zero_centered=False):
    """Arguments of both kernels; gradients have the strides of attention: [b, n, s, c] seen as [s, b, n, c]."""
    s, b, g, r, c, d = shape
    mixed = normal(s, b, g, r + 2, c, seed=1).to(dtype)
    norms = None
    if has_norm:
        weights = [normal(c, seed=seed).to(dtype) for seed in (2, 3)]
        norms = HeadNorms(*weights, 1e-5, zero_centered)
    tables = RotaryEmbedding(d, rotary_interleaved=interleaved).get_tables(s, dtype, mixed.device)
    grads = [normal(b, n, s, c, seed=4 + n).to(dtype).permute(2, 0, 1, 3) for n in (g * r, g, g)]
    return grads, mixed, norms, tables, interleaved


def formula(grads, mixed, norms, tables, interleaved):
    """Query, key, value, d mixed and d weights in fp64 by autograd of the plain form."""
    leaf = mixed.double().requires_grad_()
    weights = [] if norms is None else [w.double().requires_grad_() for w in (norms.query_weight, norms.key_weight)]
    heads = list(leaf.split([mixed.shape[3] - 2, 1, 1], dim=3))
    heads = [heads[0].flatten(2, 3), heads[1].squeeze(3), heads[2].squeeze(3)]
    wide = RotaryTables(tables.cos.double(), tables.sin.double())
    for i in range(2):
        if norms is not None:
            heads[i] = rms_norm(heads[i], weights[i], norms.eps, norms.zero_centered)
        heads[i] = apply_rotary(heads[i], wide, interleaved)
    found = torch.autograd.grad(heads, [leaf, *weights], [grad.double() for grad in grads])
    return [head.detach() for head in heads], found


def heads_job(cases):
    return [
        (*kernel_heads(mixed, norms, tables, turns), *kernel_heads_backward(grads, mixed, norms, tables, turns))
        for grads, mixed, norms, tables, turns in cases
    ]


def assert_near(got, wanted, unit):
    """Each element [...] is within one rounding of itself and fp32 roundings of the largest."""
    torch.testing.assert_close(got.double(), wanted, rtol=unit, atol=16 * 2.0**-23 * float(wanted.abs().max()))


def compare(cases, answers, dtype):
    for case, (query, key, grad_mixed, grad_weights) in zip(cases, answers, strict=True):
        if not case[1].numel():
            assert [t.shape for t in (query, key, grad_mixed)] == [case[0][0].shape, case[0][1].shape, case[1].shape]
            assert all(not weight.any() for weight in grad_weights)
            continue
        heads, wanted = formula(*case)
        for got, expected in ((query, heads[0]), (key, heads[1]), (grad_mixed, wanted[0])):
            assert got.dtype == dtype
            assert got.is_contiguous()
            assert_near(got, expected, UNIT[dtype])
        assert torch.equal(grad_mixed[:, :, :, -1], case[0][2])
        for got, expected in zip(grad_weights, wanted[1:] or (None, None), strict=True):
            assert (got is None) == (expected is None)
            if expected is not None:
                assert got.dtype == dtype
                assert_near(got, expected, UNIT[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_round_the_formula_once(interpreted, dtype):
    cases = [problem(shape, dtype) for shape in SHAPES]
    compare(cases, interpreted(heads_job, cases), dtype)


@pytest.mark.parametrize(
    "kind",
    [{"has_norm": False}, {"zero_centered": True}, {"interleaved": True}, {"interleaved": True, "has_norm": False}],
    ids=str,
)
def test_kernels_know_every_kind_of_head(interpreted, kind):
    cases = [problem(shape, torch.float32, **kind) for shape in SHAPES[:4]]
    compare(cases, interpreted(heads_job, cases), torch.float32)


def many_programs_job(case):
    """The weights' gradients by many programs and by few, each twice."""
    found = []
    for programs in (2, 1):
        with replaced(fused_qkv_heads, "PROGRAMS", programs):
            grads, mixed, norms, tables, turns = case
            once, again = (kernel_heads_backward(grads, mixed, norms, tables, turns) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(once[1], again[1], strict=True))
            found.append(once)
    return found


def test_programs_share_the_tiles_in_any_number(interpreted):
    case = problem((4, 1, 2, 4, 128, 128), torch.float32)  # three tiles
    (_, wanted) = formula(*case)
    for grad_mixed, grad_weights in interpreted(many_programs_job, case):
        for got, expected in zip((grad_mixed, *grad_weights), wanted, strict=True):
            assert_near(got, expected, UNIT[torch.float32])


def spoilt_job(case):
    """Gradients of the weights if those of value are infinite."""
    grads, mixed, norms, tables, turns = case
    infinite = [*grads[:2], torch.full_like(grads[2], torch.inf)]
    return kernel_heads_backward(infinite, mixed, norms, tables, turns)[1]


def test_what_value_holds_stays_out_of_the_norms(interpreted):
    grads, mixed, norms, tables, turns = problem(SHAPES[2], torch.float32)
    mixed[:, :, :, -1] = torch.nan
    norms = HeadNorms(norms.query_weight, norms.key_weight, 0.0, False)
    assert all(weight.isfinite().all() for weight in interpreted(spoilt_job, (grads, mixed, norms, tables, turns)))


def attention_job(norm, fuses, fields):
    """Output, gradients and the two kinds of heads of an attention whose kernels are switched on."""
    kinds = {"q_layernorm": WrappedTorchNorm, "k_layernorm": WrappedTorchNorm} if norm else {}
    config = small_config(num_query_groups=2, apply_rope_fusion=fuses, params_dtype=torch.float32, **fields)
    attention = SelfAttention(config, SelfAttentionSubmodules(**kinds), 1, AttnMaskType.causal)
    for seed, param in enumerate(attention.parameters()):
        param.data = normal(*param.shape, seed=seed).float() * 0.3
    x = normal(5, 2, 32).float().requires_grad_()
    tables = RotaryEmbedding(8).get_tables(5, torch.float32, x.device)
    with replaced(fused_rope, "uses_kernels", lambda tensor: True):
        heads = attention._rotated_heads(attention._project(x), tables)
        output, _ = attention(x, None, tables)
        leaves = [x, *attention.parameters()]
        once, again = (
            torch.autograd.grad(output.sin().sum(), leaves, retain_graph=True, allow_unused=True) for _ in range(2)
        )
    assert all(a is b or torch.equal(a, b) for a, b in zip(once, again, strict=True))
    names = [type(head.grad_fn).__name__ for head in heads]
    strides = [head.stride() for head in heads]
    return names, strides, output.detach(), once


@pytest.mark.parametrize(
    ("norm", "fields", "kind"),
    [
        (True, {"normalization": "RMSNorm"}, "_FusedHeadsBackward"),
        (False, {}, "_FusedHeadsBackward"),
        (True, {"normalization": "LayerNorm"}, "_FusedRotaryBackward"),
        (
            True,
            {"normalization": "RMSNorm", "recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            "_FusedHeadsBackward",
        ),
    ],
    ids=["rms", "no norm", "layer norm", "recompute"],
)
def test_attention_with_kernels_is_the_plain_one(interpreted, norm, fields, kind):
    names, strides, output, grads = interpreted(attention_job, norm, True, fields)
    plain_names, _, plain_output, plain_grads = interpreted(attention_job, norm, False, fields)
    assert names[:2] == [kind] * 2
    assert kind not in plain_names
    assert strides[:2] == [(64, 32, 8, 1), (32, 16, 8, 1)]  # contiguous
    assert strides[2] == (128, 64, 32, 1)  # inside the product
    torch.testing.assert_close(output, plain_output, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(grads, plain_grads, strict=True):
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("kernel", [_heads_kernel, _heads_backward_kernel], ids=["forward", "backward"])
def test_kernels_compile_for_hopper_and_move_16_bytes_at_a_time(kernel, interleaved, has_norm):
    constants = {"groups": 4, "slots": 10, "heads": 16, "pairs": 64, "rest": 0, "zero_centered": False}
    constants |= {"interleaved": interleaved, "interpreted": False, "stages": 1}
    constants |= {} if has_norm else dict.fromkeys(("query_weight", "key_weight", "sums"))
    ptx = compiled_for_hopper(kernel, constants, {"sums": "*fp32", "eps": "fp32"})
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx
