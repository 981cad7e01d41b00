"""Kernels that are limited by memory, on a GPU: the formula within one rounding, repeatable, captured, near a copy."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions import fused_qkv_heads
from megatron.core.fusions.fused_bias_glu import bias_glu
from megatron.core.fusions.fused_qkv_heads import HeadNorms, fused_heads
from megatron.core.fusions.fused_rope import RotaryTables, apply_rotary
from megatron.core.fusions.fused_weighted_activation import weighted_activation
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from tests.common.mutants import replaced
from tests.common.small_models import small_config
from tests.unit_tests.core.fusions import test_fused_qkv_heads as heads_cases
from tests.unit_tests.core.fusions import test_fused_rope as rotary_cases
from tests.unit_tests.core.fusions.test_fused_swiglu import UNIT, assert_rounded_once, formula
from tools.benchmark import elementwise
from tools.benchmark.result import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))
SHARE_OF_COPY = 0.85
SHORT_OF_IT = {"heads A backward": 0.75, "heads C backward": 0.68}
"""Kernels that miss the share: 0.80 and 0.72 of a copy on an H200; these floors only keep them from getting worse."""
SLICE_A, PARTLY_TURNED = (300, 2, 4, 8, 128, 128), (17, 3, 2, 1, 192, 64)  # (s, b, g, r, c, d)
BF16, DEVICE = torch.bfloat16, torch.device("cuda")


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def gradients(y, leaves, grad):
    """Gradients twice, equal bit for bit."""
    once, again = (torch.autograd.grad(y, leaves, grad, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    return once


@pytest.mark.parametrize(
    ("num_rows", "width", "dtype"),
    [
        (1, 128, BF16),
        (3, 130, BF16),
        (1000, 768, BF16),
        (5, 14336, BF16),
        (0, 128, BF16),
        (1000, 768, torch.float16),
        (1000, 768, torch.float32),
    ],
    ids=str,
)
def test_swiglu_is_the_formula_rounded_once(num_rows, width, dtype):
    x = normal(num_rows, 2 * width + 2, dtype=dtype)[:, 1:-1].requires_grad_()
    bias, probs = normal(2 * width, seed=2, dtype=dtype).requires_grad_(), normal(num_rows, seed=3).float()
    probs.requires_grad_()
    grad = normal(num_rows, width, seed=1, dtype=dtype)
    weighted, dense = weighted_activation(x, probs, F.silu, True), bias_glu(x, bias, F.silu)
    assert "FusedSwiglu" in type(weighted.grad_fn).__name__
    assert "FusedSwiglu" in type(dense.grad_fn).__name__
    grads = gradients(weighted, (x, probs), grad), gradients(dense, (x, bias), grad)
    if not num_rows:
        return
    wanted = formula(x.detach(), None, probs.detach(), grad)
    assert_rounded_once(weighted.detach(), wanted[0], UNIT[dtype])
    assert_rounded_once(grads[0][0], wanted[1], UNIT[dtype])
    torch.testing.assert_close(grads[0][1].double(), wanted[2], rtol=1e-4, atol=1e-3)
    wanted = formula(x.detach(), bias.detach(), None, grad)
    assert_rounded_once(dense.detach(), wanted[0], UNIT[dtype])
    assert_rounded_once(grads[1][0], wanted[1], UNIT[dtype])


def test_swiglu_of_rows_beyond_32_bits_reaches_the_last():
    num_rows = (1 << 31) // 1536 + 3
    x = torch.zeros(num_rows, 1536, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1.0
    y = weighted_activation(x, torch.ones(num_rows, device="cuda"), F.silu, True)
    assert torch.equal(y[-1], torch.full_like(y[-1], F.silu(torch.tensor(1.0)).item()))
    assert not y[0].any()


def test_rotary_embedding_is_the_formula_rounded_once():
    for t, tables, interleaved in rotary_cases.kernel_cases(BF16):
        leaf, tables = t.cuda().requires_grad_(), RotaryTables(tables.cos.cuda(), tables.sin.cuda())
        turned = apply_rotary(leaf, tables, interleaved)
        assert "FusedRotary" in type(turned.grad_fn).__name__
        wide = leaf.detach().double().requires_grad_()
        wanted = apply_rotary(wide, RotaryTables(tables.cos.double(), tables.sin.double()), interleaved)
        if t.numel():
            rotary_cases.assert_turned(turned.detach(), wanted.detach(), rotary_cases.UNIT[BF16])
            (got,) = gradients(turned, (leaf,), turned.detach())
            (expected,) = torch.autograd.grad(wanted, wide, turned.detach().double())
            rotary_cases.assert_turned(got, expected, rotary_cases.UNIT[BF16])


def moved(problem):
    """A problem of the heads' kernels on the GPU."""
    grads, mixed, norms, tables, interleaved = problem
    if norms is not None:
        weights = norms.query_weight.cuda(), norms.key_weight.cuda()
        norms = HeadNorms(*weights, norms.eps, norms.zero_centered)
    tables = RotaryTables(tables.cos.cuda(), tables.sin.cuda())
    return [grad.cuda() for grad in grads], mixed.cuda(), norms, tables, interleaved


@pytest.mark.parametrize(
    ("dtype", "has_norm", "interleaved", "shapes"),
    [
        (BF16, True, False, [SLICE_A, PARTLY_TURNED, *heads_cases.SHAPES[1:]]),
        (BF16, False, False, [SLICE_A]),
        (BF16, True, True, [SLICE_A, PARTLY_TURNED]),
        (BF16, False, True, [SLICE_A]),
        (torch.float32, True, False, [SLICE_A]),
    ],
    ids=str,
)
def test_heads_are_the_formula_rounded_once(dtype, has_norm, interleaved, shapes):
    cases = [moved(heads_cases.problem(shape, dtype, interleaved, has_norm, has_norm)) for shape in shapes]
    answers, again = (heads_cases.heads_job(cases) for _ in range(2))
    heads_cases.compare(cases, answers, dtype)
    for once, twice in zip(answers, again, strict=True):
        assert torch.equal(once[2], twice[2])
        assert not has_norm or all(torch.equal(a, b) for a, b in zip(once[3], twice[3], strict=True))


def test_tiles_loaded_ahead_change_no_bit():
    case = moved(heads_cases.problem(SLICE_A, BF16))
    answers = []
    for stages in (1, 2, 3):
        with replaced(fused_qkv_heads, "STAGES", stages):
            grad_mixed, grad_weights = heads_cases.heads_job([case])[0][2:]
            answers.append((grad_mixed, *grad_weights))
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))


def test_cudnn_takes_and_gives_heads_without_a_copy():
    fields = {
        "num_query_groups": 2,
        "num_attention_heads": 8,
        "kv_channels": 64,
        "hidden_size": 256,
        "device": "cuda",
    }
    fields |= {"normalization": "RMSNorm", "bf16": True, "attention_backend": "fused", "add_bias_linear": False}
    kinds = {"q_layernorm": WrappedTorchNorm, "k_layernorm": WrappedTorchNorm}
    attention = SelfAttention(small_config(**fields), SelfAttentionSubmodules(**kinds), 1, AttnMaskType.causal).cuda()
    mixed = normal(128, 2, 2, 6, 64).requires_grad_()
    tables = RotaryEmbedding(64).get_tables(128, BF16, DEVICE)
    query, key, value = attention._rotated_heads(mixed, tables)
    assert "FusedHeads" in type(query.grad_fn).__name__
    assert value.data_ptr() == mixed[:, :, :, -1].data_ptr()
    grad = normal(128, 2, 512, seed=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        torch.autograd.grad(attention.core_attention(query, key, value), mixed, grad)
    copies = [event for event in profile.events() if event.name in ("aten::copy_", "aten::clone", "aten::cat")]
    sizes = [max((math.prod(shape) for shape in event.input_shapes if shape), default=0) for event in copies]
    assert all(size < key.numel() for size in sizes), [(event.name, event.input_shapes) for event in copies]


def test_heads_are_captured_and_never_wait():
    _, mixed, norms, tables, _ = moved(heads_cases.problem((64, 2, 2, 4, 128, 128), torch.bfloat16))
    leaves = [mixed.requires_grad_(), norms.query_weight.requires_grad_(), norms.key_weight.requires_grad_()]

    def step():
        heads = fused_heads(mixed, norms, tables, False)
        return *heads, *torch.autograd.grad(heads, leaves, [head.detach() for head in heads])

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        mixed.copy_(normal(*mixed.shape, seed=7))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_swiglu_is_captured_and_never_waits():
    x, probs, grad = normal(300, 1536).requires_grad_(), normal(300).float().requires_grad_(), normal(300, 768, seed=1)

    def step():
        y = weighted_activation(x, probs, F.silu, True)
        return y, *torch.autograd.grad(y, (x, probs), grad)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(normal(300, 1536, seed=7))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_bandwidth_is_near_that_of_a_copy():
    assert elementwise.main(["--folder", str(FOLDER)]) == 0
    results = json.loads((FOLDER / "elementwise.json").read_text(encoding="utf-8"))["results"]
    shares = {f"{case} {name}": row["share_of_copy"] for case, rows in results.items() for name, row in rows.items()}
    assert all(share >= SHORT_OF_IT.get(name, SHARE_OF_COPY) for name, share in shares.items()), shares


def test_tilings_are_swept():
    assert elementwise.main(["--sweep", "--folder", str(FOLDER)]) == 0
