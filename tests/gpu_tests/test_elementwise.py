"""Kernels that are limited by memory, on a GPU: the formula within one rounding, repeatable, captured, near a copy."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_bias_glu import bias_glu
from megatron.core.fusions.fused_weighted_activation import weighted_activation
from tests.unit_tests.core.fusions.test_fused_swiglu import UNIT, assert_rounded_once, formula
from tools.benchmark import elementwise
from tools.benchmark.result import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))
SHARE_OF_COPY = 0.85


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def gradients(y, leaves, grad):
    """Gradients twice, equal bit for bit."""
    once, again = (torch.autograd.grad(y, leaves, grad, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    return once


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 128), (3, 130), (1000, 768), (5, 14336), (0, 128), (7, 1)])
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
    assert min(shares.values()) >= SHARE_OF_COPY, shares
