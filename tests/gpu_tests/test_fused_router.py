"""The kernels of the router on a GPU: against fp64, twice the same bits, without a host wait, and timed."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core.fusions.fused_gate import wide_linear
from tests.unit_tests.core.fusions.test_fused_router import CASES, check, make_case, routing_job
from tools.benchmark import memory_bound
from tools.benchmark.result import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))
CHOSEN = ("many_experts", "odd_experts", "sqrtsoftplus_bias", "pre_softmax_2", "small_scores", "no_token", "one_expert")


def on_gpu(case):
    logits, rule, tokens, grads = case
    moved = {name: value.cuda() for name, value in vars(tokens).items() if isinstance(value, torch.Tensor)}
    return logits.cuda(), rule, replace(tokens, **moved), grads


@pytest.mark.parametrize("name", CHOSEN)
def test_kernels_are_the_plain_form_and_repeat(name):
    arguments, fields = CASES[name]
    case = make_case(*arguments, **fields)
    first, second = routing_job(*on_gpu(case)), routing_job(*on_gpu(case))
    check(first, case, slack=4.0)
    assert all(torch.equal(a, b) for a, b in zip([*first[0], first[1]], [*second[0], second[1]], strict=True))


def test_whole_microbatch_is_routed_as_in_the_plain_form():
    case = make_case("softmax", 16384, 128, 8, num_samples=4)
    check(routing_job(*on_gpu(case)), case, slack=8.0)


def test_gate_keeps_fp32_between_bf16_operands():
    hidden = torch.randn(4096, 1, 2048, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(128, 2048, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(4096, 1, 128, device="cuda")
    logits = wide_linear(hidden, weight)
    logits.backward(grad)
    exact = hidden.detach().double() @ weight.detach().double().t()
    assert (logits.double() - exact).abs().max() < 1e-5 * exact.abs().max()
    for got, wanted in (
        (hidden.grad, grad.double() @ weight.detach().double()),
        (weight.grad, grad.double().view(-1, 128).t() @ hidden.detach().double().view(-1, 2048)),
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=2.0**-8 * 1.02, atol=1e-5 * wanted.abs().max().item())


def test_router_is_faster_than_its_plain_form():
    assert memory_bound.main(["--rows", "router", "--folder", str(FOLDER)]) == 0
    rows = json.loads((FOLDER / "fused-router.json").read_text(encoding="utf-8"))["results"]["rows"]
    times = {(row["name"], row["note"]): row["us"] for row in rows}
    assert times["router, both", "kernels"] < times["router, both", "plain form"]
    assert times["gate, both", "bf16 to fp32"] < times["gate, both", "fp32"]
