"""The kernel of an Adam step on a GPU: as torch's fused one, captured, silent, and timed beside a copy."""

import json
import os
from pathlib import Path

import pytest
import torch

from megatron.core.optimizer.neighbours import zeros_beside
from megatron.core.optimizer.precision_aware_adam import PrecisionAwareAdam
from tools.benchmark import memory_bound
from tools.benchmark.result import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))
SHARE_OF_COPY = 0.85
SIZES = (1, 1000, 65537, 1 << 20)
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


def normal(count, seed):
    return torch.randn(count, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def our_optimizer(moment=torch.float32):
    """Adam over parameters of some sizes, each with a bf16 rounding; all lie end to end but the last."""
    storage = normal(sum(SIZES) + 100, 1)
    ends = [sum(SIZES[:i]) for i in range(len(SIZES))]
    ends[-1] += 100
    params = [torch.nn.Parameter(storage[end : end + count]) for end, count in zip(ends, SIZES, strict=True)]
    rounded = storage.bfloat16()
    means, squares = (zeros_beside(params, lambda dtype: moment) for _ in range(2))
    optimizer = PrecisionAwareAdam(
        [{"params": params, "lr": torch.tensor(0.01, device="cuda"), "weight_decay": DECAY}], BETAS, EPS, True
    )
    for param, mean, square in zip(params, means, squares, strict=True):
        place = param.storage_offset()
        param.rounded = rounded[place : place + param.numel()]
        optimizer.state[param] = {"step": torch.zeros((), device="cuda"), "exp_avg": mean, "exp_avg_sq": square}
    return optimizer, params


def give_gradients(params, seed, dtype=torch.float32):
    """Gradients that lie as the parameters do."""
    grads = normal(sum(SIZES) + 100, seed).to(dtype)
    for param in params:
        place = param.storage_offset()
        param.decoupled_grad = grads[place : place + param.numel()]


@pytest.mark.parametrize("grad_scale", [None, 3.7])
def test_steps_are_those_of_torch(grad_scale):
    ours, params = our_optimizer()
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    theirs = torch.optim.AdamW(others, lr=0.01, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True, capturable=True)
    theirs.param_groups[0]["lr"] = torch.tensor(0.01, device="cuda")
    for step in range(5):
        is_raised = torch.tensor(float(step == 2), device="cuda")
        for optimizer in (ours, theirs):
            optimizer.found_inf = is_raised
            optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale, device="cuda")
        give_gradients(params, 100 + step)
        for param, other in zip(params, others, strict=True):
            other.grad = param.decoupled_grad.clone()
        ours.step()
        theirs.step()
    for param, other in zip(params, others, strict=True):
        pairs = [(param, other)] + [(ours.state[param][key], theirs.state[other][key]) for key in theirs.state[other]]
        for mine, their in pairs:
            torch.testing.assert_close(mine, their, rtol=2e-6, atol=2e-6)
        assert torch.equal(param.rounded, param.detach().bfloat16())


def test_moments_in_bf16_are_those_of_fp32_rounded():
    (ours, params), (wide, wide_params) = our_optimizer(torch.bfloat16), our_optimizer()
    for optimizer, own in ((ours, params), (wide, wide_params)):
        give_gradients(own, 7, torch.bfloat16)
        optimizer.step()
    for param, other in zip(params, wide_params, strict=True):
        assert torch.equal(param, other)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[param][key], wide.state[other][key].bfloat16())


@pytest.mark.parametrize("guard", [None, 0.0, 1.0])
def test_captured_step_is_the_eager_one(guard):
    (captured, params), (eager, others) = our_optimizer(), our_optimizer()
    for own in (params, others):
        give_gradients(own, 3)
    for optimizer in (captured, eager):
        optimizer.found_inf = None if guard is None else torch.tensor(guard, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(2):
        graph.replay()
    eager.step()
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))
    assert captured.state[params[0]]["step"].item() == (0.0 if guard else 2.0)


def test_bandwidth_is_near_that_of_a_copy():
    assert memory_bound.main(["--rows", "adam", "--sweep", "--folder", str(FOLDER)]) == 0
    rows = json.loads((FOLDER / "fused-adam.json").read_text(encoding="utf-8"))["results"]["rows"]
    shares = {row["note"]: row["share_of_copy"] for row in rows}
    assert shares[rows[0]["note"]] >= SHARE_OF_COPY, shares
