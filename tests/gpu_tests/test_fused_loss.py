"""The kernels of the cross entropy on a GPU: against fp64, twice the same bits, captured, and timed beside a copy."""

import json
import os
from pathlib import Path

import pytest
import torch

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.unit_tests.core.fusions.test_fused_cross_entropy import CASES, check, make_case
from tools.benchmark import memory_bound
from tools.benchmark.result import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))
SHARE_OF_COPY = 0.7
LARGE = ((65, 3, 38016), 38015, torch.bfloat16)


def losses_and_gradient(logits, targets, num_real, grad):
    leaf = logits.cuda().requires_grad_()
    losses = vocab_parallel_cross_entropy(leaf, targets.cuda(), true_vocab_size=num_real, fuses=True)
    losses.backward(grad.cuda())
    return losses.detach().cpu(), leaf.grad.cpu()


@pytest.mark.parametrize("shape", [*CASES.values(), LARGE], ids=str)
def test_kernels_are_the_formula_and_repeat(shape):
    case = make_case(*shape)
    first = losses_and_gradient(*case)
    check(first, case)
    assert all(torch.equal(a, b) for a, b in zip(first, losses_and_gradient(*case), strict=True))


def test_offsets_beyond_32_bits_reach_the_last_row():
    num_rows, width = (1 << 31) // 32768 + 3, 32768
    logits = torch.zeros(num_rows, 1, width, device="cuda", dtype=torch.bfloat16)
    targets = torch.zeros(num_rows, 1, device="cuda", dtype=torch.int64)
    logits[-1, 0, 5], targets[-1] = 20.0, 5
    losses = vocab_parallel_cross_entropy(logits.requires_grad_(), targets, fuses=True)
    losses.sum().backward()
    assert losses[-1].item() < 1e-3 < losses[-2].item()
    assert logits.grad[-1, 0, 5].abs() < 1e-3
    assert logits.grad[-2, 0, 0] < -0.9


def test_capture_replays_on_other_logits_without_a_host_wait():
    logits, targets, num_real, grad = (x.cuda() if isinstance(x, torch.Tensor) else x for x in make_case(*LARGE))
    leaf = logits.requires_grad_()

    def step():
        losses = vocab_parallel_cross_entropy(leaf, targets, true_vocab_size=num_real, fuses=True)
        return losses, *torch.autograd.grad(losses, leaf, grad)

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
        leaf[..., :num_real].mul_(-0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_bandwidth_is_near_that_of_a_copy():
    assert memory_bound.main(["--rows", "loss", "--folder", str(FOLDER), "--sweep"]) == 0
    rows = json.loads((FOLDER / "fused-loss.json").read_text(encoding="utf-8"))["results"]["rows"]
    best = {row["name"]: max(r["share_of_copy"] for r in rows if r["name"] == row["name"]) for row in rows}
    assert best["cross entropy forward"] >= SHARE_OF_COPY, best
    assert best["cross entropy backward"] >= SHARE_OF_COPY, best
