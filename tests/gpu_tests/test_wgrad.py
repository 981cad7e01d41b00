"""Weight gradients on a GPU: the grouped kernel against fp64, any configuration, poisoned tails, graphs, deferring."""

import os

import pytest
import torch

from megatron.core.deferred_wgrad import WgradQueue, deferring
from megatron.core.fusions.fused_wgrad import accumulate_wgrad
from megatron.core.fusions.grouped_wgrad import LARGE, SMALL, WgradConfig, grouped_wgrad, uses_wgrad_kernel
from tests.gpu_tests.test_moe_layer import build_layer
from tools.benchmark import grouped_gemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIGS = (
    LARGE,
    SMALL,
    WgradConfig(band=2, num_stages=3, pieces=2, skews=False),
    WgradConfig(64, 64, programs_per_sm=2, num_warps=4, num_stages=2),
)
COUNTS = ([5, 0, 300, 0], [0, 0, 0, 0], [64, 1000, 63, 65], [129], [0, 0, 0, 777])
FOLDER = ["--folder", os.environ["OUT"]] if "OUT" in os.environ else []
OUT, IN, SPARE = 328, 456, 64  # neither is a multiple of a tile


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def problem(counts, dtype=torch.bfloat16, main_dtype=torch.float32):
    """main [n, out, in], grad [R, out], rows [R, in], ends; rows behind the last group hold NaN."""
    num_rows = sum(counts)
    grad = torch.cat(
        [normal(num_rows, OUT, seed=1, dtype=dtype), torch.full((SPARE, OUT), torch.nan).to("cuda", dtype)]
    )
    rows = torch.cat([normal(num_rows, IN, seed=2, dtype=dtype), torch.full((SPARE, IN), torch.nan).to("cuda", dtype)])
    main = normal(len(counts), OUT, IN, seed=3, dtype=main_dtype)
    return main, grad, rows, torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)


def expected(main, grad, rows, counts):
    """The same in fp64."""
    wanted, begin = main.double(), 0
    for expert, count in enumerate(counts):
        group = slice(begin, begin + count)
        wanted[expert] += grad[group].double().t() @ rows[group].double()
        begin += count
    return wanted


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_kernel_equals_fp64_and_leaves_empty_groups_alone(counts):
    main, grad, rows, ends = problem(counts)
    before, wanted = main.clone(), expected(main, grad, rows, counts)
    assert uses_wgrad_kernel(main, grad, rows)
    accumulate_wgrad(main, grad, rows, ends)
    torch.testing.assert_close(main.double(), wanted, rtol=1e-5, atol=1e-3)
    for expert, count in enumerate(counts):
        assert count > 0 or torch.equal(main[expert], before[expert])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("main_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernel_rounds_once(dtype, main_dtype):
    counts = COUNTS[2]
    main, grad, rows, ends = problem(counts, dtype, main_dtype)
    wanted = expected(main, grad, rows, counts)
    accumulate_wgrad(main, grad, rows, ends)
    bound = 2**-8 if main_dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(main.double(), wanted, rtol=bound, atol=1e-3)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_configuration_gives_the_same_bits(counts):
    main, grad, rows, _ = problem(counts)
    wanted, results = expected(main, grad, rows, counts), []
    for config in CONFIGS:
        main, grad, rows, ends = problem(counts)
        grouped_wgrad(main, grad, rows, ends, config)
        results.append(main)
        torch.testing.assert_close(main.double(), wanted, rtol=1e-5, atol=1e-3)
    differing = [config for config, main in zip(CONFIGS, results, strict=True) if not torch.equal(main, results[0])]
    assert differing == [], [float((main - results[0]).abs().max()) for main in results]


def test_kernel_never_makes_the_host_wait_and_replays_in_a_graph():
    counts = COUNTS[2]
    main, grad, rows, ends = problem(counts)
    start = main.clone()
    grouped_wgrad(main, grad, rows, ends)
    torch.cuda.set_sync_debug_mode("error")
    try:
        accumulate_wgrad(main, grad, rows, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    twice = main.clone()
    main.copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulate_wgrad(main, grad, rows, ends)
    graph.replay()
    graph.replay()
    assert torch.equal(main, twice)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dense_product_adds_without_rounding_in_between(dtype):
    grad, rows = normal(1000, OUT, seed=1, dtype=dtype), normal(1000, IN, seed=2, dtype=dtype)
    main = normal(OUT, IN, seed=3, dtype=torch.float32)
    wanted = main.double() + grad.double().t() @ rows.double()
    accumulate_wgrad(main, grad, rows)
    torch.testing.assert_close(main.double(), wanted, rtol=1e-4, atol=1e-2 if dtype is torch.float32 else 1e-3)


def layer_gradients(is_delayed):
    """Main gradients of a MoE layer after two microbatches."""
    layer = build_layer("cuda", bf16=True, params_dtype=torch.bfloat16, moe_grouped_gemm=True)
    for param in layer.parameters():
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)
    for seed in (0, 2):
        queue = WgradQueue() if is_delayed else None
        with deferring(queue):
            out = layer(normal(48, 2, 64, seed=seed).requires_grad_())[0]
        out.backward(normal(48, 2, 64, seed=seed + 1))
        if queue is not None:
            assert len(queue) > 0
            queue.flush()
    return {name: param.main_grad for name, param in layer.named_parameters() if param.grad is None}


def test_delayed_weight_gradients_change_no_bit():
    once, again, delayed = layer_gradients(False), layer_gradients(False), layer_gradients(True)
    assert all(torch.equal(once[name], again[name]) for name in once), "not deterministic"
    assert [name for name in once if not torch.equal(once[name], delayed[name])] == []
    assert sum(bool(grad.any()) for grad in once.values()) > 2


def test_benchmark_prints_the_speed():
    assert grouped_gemm.main(FOLDER) == 0


@pytest.mark.parametrize(
    "words", [[], ["--groups", "random", "--shapes", "A fc1", "A fc2", "B fc1", "C fc1"]], ids=["even", "random"]
)
def test_benchmark_sweeps_all_shapes(words):
    assert grouped_gemm.main(["--sweep", *words, *FOLDER]) == 0
