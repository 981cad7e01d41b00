"""The weight gradient with specialised warps on Hopper: the bits of the other form, codes, tails, graphs, speed."""

import os

import pytest
import torch

from megatron.core.fusions.grouped_wgrad import LARGE, grouped_wgrad, num_free_sms
from megatron.core.fusions.ring_wgrad import LONE, SHARED, Operand, RingCut, can_run_ring, ring_wgrad
from tests.gpu_tests.test_wgrad import COUNTS, IN, OUT, SPARE, normal, problem
from tools.benchmark import wgrad_sweep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

CUTS = {
    "lone": LONE,
    "shared": SHARED,
    "narrow": RingCut(slots=2, band=2),
    "late": RingCut(2, slots=2, band=1),
}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CODE_COUNTS = ((16, 0, 272, 48, 1008), (0, 0, 0), (128,), (16,) * 40)
BOUND = 1e-3
"""Tensor cores keep about 14 bits of a running sum of 128 products."""
FOLDER = ["--folder", os.environ["OUT"]] if "OUT" in os.environ else []


def ring(main, grad, rows, ends, cut):
    assert can_run_ring(main)
    ring_wgrad(main, grad, rows, ends, num_free_sms(main.device), cut)
    return main


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_ring_has_the_bits_of_the_other_form(counts, dtype, cut):
    main, grad, rows, ends = problem(counts, dtype)
    wanted = main.clone()
    for _ in range(2):
        grouped_wgrad(wanted, grad, rows, ends, LARGE)
        ring(main, Operand(grad), Operand(rows), ends, cut)
    assert torch.equal(main, wanted), float((main - wanted).abs().max())


def codes(features, num_rows, dtype, seed):
    """[features, R + SPARE]; the columns behind the last expert are NaN."""
    values = normal(features, num_rows, seed=seed).to(dtype)
    return torch.cat([values, torch.full((features, SPARE), torch.nan, device="cuda").to(dtype)], dim=1)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("counts", CODE_COUNTS, ids=str)
def test_ring_multiplies_codes_as_fp64_does(counts, dtype, cut):
    num_rows, count = sum(counts), len(counts)
    left, right = codes(OUT, num_rows, dtype, 1), codes(IN, num_rows, E4M3, 2)
    left_scale, right_scale = (normal(count, size, seed=3, dtype=torch.float32) for size in (OUT, IN))
    main = normal(count, OUT, IN, seed=4, dtype=torch.float32)
    wanted, begin = main.double(), 0
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    for expert, end in enumerate(ends.tolist()):
        group = left[:, begin:end].double() * left_scale[expert].double()[:, None]
        wanted[expert] += group @ (right[:, begin:end].double() * right_scale[expert].double()[:, None]).t()
        begin = end
    before = main.clone()
    ring(main, Operand(left, left_scale), Operand(right, right_scale), ends, cut)
    for expert, size in enumerate(counts):
        gap, whole = (main[expert] - wanted[expert]).norm(), (wanted[expert] - before[expert]).norm()
        assert float(gap) <= BOUND * float(whole), (expert, size, float(gap), float(whole))
    assert all(torch.equal(main[i], before[i]) for i, size in enumerate(counts) if size == 0)


def test_ring_never_makes_the_host_wait_and_replays_in_a_graph():
    main, grad, rows, ends = problem(COUNTS[2])
    start, operands = main.clone(), (Operand(grad), Operand(rows))
    ring(main, *operands, ends, LONE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ring(main, *operands, ends, LONE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    twice = main.clone()
    main.copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ring(main, *operands, ends, LONE)
    graph.replay()
    graph.replay()
    assert torch.equal(main, twice)


def test_cuts_of_all_forms_are_swept():
    assert wgrad_sweep.main(FOLDER) == 0
