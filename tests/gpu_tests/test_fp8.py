"""FP8 on a GPU: bits of the quantisers, products against fp64, layers against the CPU, no waiting, replay, speed."""

import math
import os

import pytest
import torch

from megatron.core.fp8.gemm import add_grouped_wgrad, grouped_matmul, matmul
from megatron.core.fp8.layer_state import Fp8LayerState, Fp8Setup
from megatron.core.fp8.linear import fp8_grouped_linear, fp8_linear
from megatron.core.fp8.operand import quantize_activation, quantize_weight
from megatron.core.fp8.plain_operand import factor_from_history, plain_activation, plain_amax, plain_weight
from megatron.core.fp8.quantize import AmaxHistory
from megatron.core.fp8.recipes import RECIPES, gradient_dtype
from tests.common.fp8 import COUNTS, activation, ends_of, parts_of, same_bits, weights
from tests.unit_tests.core.fp8 import test_swiglu as swiglu
from tools.benchmark import fp8 as benchmark

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = list(RECIPES)
DTYPES = {"e4m3": E4M3, "hybrid": E5M2}
FOLDER = ["--folder", os.environ["OUT"]] if "OUT" in os.environ else []
# Tensor cores keep about 14 bits of a running sum; the last rounding is that of the output.
FAST_BOUND, PRECISE_BOUND = 1e-2, 2e-3
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 0.0}


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def history_for(name, device, past=12.0):
    """What a recipe knows of earlier steps."""
    if not RECIPES[name].uses_history:
        return None
    return AmaxHistory(torch.tensor(past, device=device), torch.zeros((), device=device), margin=1)


def factor_for(name, values, dtype, ends=None, past=12.0):
    """What the plain form multiplies by, if a history tells."""
    history = history_for(name, "cpu", past)
    return None if history is None else factor_from_history(values, dtype, history, ends)


def on_gpu(tensor):
    return None if tensor is None else tensor.cuda()


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


# ---- bits ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fp8_format", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_activations_have_the_bits_of_the_cpu(name, fp8_format, source, counts, bad):
    values, recipe, dtype = activation(counts, source, bad=bad), RECIPES[name], DTYPES[fp8_format]
    ends = ends_of(counts)
    want = plain_activation(values, recipe, dtype, ends, factor_for(name, values, dtype, ends))
    got = quantize_activation(values.cuda(), recipe, dtype, on_gpu(ends), history_for(name, "cuda"))
    assert same_bits(parts_of(got), parts_of(want)) == []


@pytest.mark.parametrize("shape", [(3, 144, 160), (144, 160), (2, 256, 384)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_bits_of_the_cpu(name, shape):
    weight, recipe = weights(*shape), RECIPES[name]
    want = plain_weight(weight, recipe, E4M3, factor_for(name, weight, E4M3))
    got = quantize_weight(weight.cuda(), recipe, E4M3, history_for(name, "cuda"))
    assert same_bits(parts_of(got), parts_of(want)) == []


@pytest.mark.parametrize("past", [0.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_a_large_matrix_has_the_bits_of_the_cpu(name, past):
    counts, recipe = [(128 if name == "blockwise" else 16) * (5 * i % 7) for i in range(16)], RECIPES[name]
    values, ends = normal(sum(counts), 2048, seed=3).cpu(), ends_of(counts)
    want = plain_activation(values, recipe, E4M3, ends, factor_for(name, values, E4M3, ends, past))
    history = history_for(name, "cuda", past)
    got = quantize_activation(values.cuda(), recipe, E4M3, on_gpu(ends), history)
    assert same_bits(parts_of(got), parts_of(want)) == []
    if history is not None:
        assert history.noted.cpu() == plain_amax(values, ends)


LARGE = (640, 0, 384, 1024, 128, 2176)


SWIGLU_CASES = [
    swiglu.Case(name, width, counts, bad, past, has_probs=bad is not None or width > 128)
    for name, past in (("delayed", 0.0), ("delayed", 3.0), ("tensorwise", None), ("rowwise", None))
    for width, counts, bad in ((128, COUNTS[0], None), (128, COUNTS[0], -math.inf), (768, LARGE, None))
]


@pytest.mark.parametrize("case", SWIGLU_CASES, ids=str)
def test_swiglu_in_codes_equals_two_steps(case):
    got, again, want = swiglu.in_one(case, "cuda"), swiglu.in_one(case, "cuda"), swiglu.apart(case, "cuda")
    swiglu.assert_same(case, got, want)
    if case.has_probs:
        assert torch.equal(got[2].nan_to_num(), again[2].nan_to_num())


# ---- products --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fp8_format", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(256, 384, 512), (272, 384, 768), (144, 160, 192), (512, 1024, 1536)], ids=str)
def test_dense_products_equal_fp64(name, fp8_format, out_dtype, sizes):
    tokens, outs, ins = sizes
    recipe = RECIPES[name]
    x = quantize_activation(normal(tokens, ins, seed=1), recipe, E4M3)
    dy = quantize_activation(normal(tokens, outs, seed=2), recipe, DTYPES[fp8_format])
    w = quantize_weight(normal(outs, ins, seed=3), recipe, E4M3)
    products = {
        "forward": (x.by_row, w.by_row, True),
        "dgrad": (dy.by_row, w.by_column, False),
        "wgrad": (dy.by_column, x.by_column, False),
    }
    failed = {}
    for product, (a, b, is_fast) in products.items():
        want = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
        try:
            error = relative(matmul(a, b, out_dtype, is_fast), want)
        except (RuntimeError, ValueError) as refusal:
            failed[product] = str(refusal)[:200]
            continue
        if not error < (FAST_BOUND if is_fast else PRECISE_BOUND) + ROUNDING[out_dtype]:
            failed[product] = f"{error:.2e}"
    assert failed == {}


GROUPS = [(256, 0, 384, 128), (0, 0, 0), (128,), (128,) * 5]
UNEVEN = [(16, 0, 272, 48, 1008), *GROUPS]


def expert_of(operand, expert, begin, end, by_column=False):
    """Values fp64 of one expert's lines."""
    if by_column:
        if operand.block is None and operand.scale.dim() == 2:
            return operand.codes[:, begin:end].double() * operand.scale[expert].double().unsqueeze(1)
        return operand.dequantize(torch.float64)[:, begin:end]
    return operand.dequantize(torch.float64)[begin:end]


@pytest.mark.parametrize("fp8_format", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_grouped_products_equal_fp64(name, fp8_format, counts):
    recipe, spare, (outs, ins) = RECIPES[name], 128, (320, 448)
    counts = [count // recipe.row_multiple * recipe.row_multiple for count in counts]
    tail = torch.full((spare, outs + ins), torch.nan, device="cuda", dtype=torch.bfloat16)
    rows = torch.cat([normal(sum(counts), ins, seed=1), tail[:, :ins]])
    grad = torch.cat([normal(sum(counts), outs, seed=2), tail[:, :outs]])
    ends = ends_of(counts, "cuda")
    x = quantize_activation(rows, recipe, E4M3, ends)
    dy = quantize_activation(grad, recipe, DTYPES[fp8_format], ends)
    w = quantize_weight(normal(len(counts), outs, ins, seed=3), recipe, E4M3)
    main = normal(len(counts), outs, ins, seed=4, dtype=torch.float32)
    before = main.clone()
    results = {
        is_fast: (
            grouped_matmul(x.by_row, w.by_row, ends, torch.bfloat16, is_fast),
            grouped_matmul(dy.by_row, w.by_column, ends, torch.bfloat16, is_fast),
        )
        for is_fast in (True, False)
    }
    add_grouped_wgrad(main, dy.by_column, x.by_column, ends)
    begin, errors = 0, {}
    for expert, end in enumerate(ends.tolist()):
        if begin == end:
            assert torch.equal(main[expert], before[expert])
            continue
        w_row, w_column = (part.dequantize(torch.float64)[expert] for part in (w.by_row, w.by_column))
        for is_fast, (out, back) in results.items():
            want = expert_of(x.by_row, expert, begin, end) @ w_row.t()
            want_back = expert_of(dy.by_row, expert, begin, end) @ w_column.t()
            errors[expert, "fwd", is_fast] = relative(out[begin:end], want)
            errors[expert, "dgrad", is_fast] = relative(back[begin:end], want_back)
        left, right = (expert_of(part, expert, begin, end, by_column=True) for part in (dy.by_column, x.by_column))
        errors[expert, "wgrad", False] = relative(main[expert] - before[expert], left @ right.t())
        begin = end
    if errors:
        print(f"{name} {fp8_format} {counts}: largest {max(errors.items(), key=lambda item: item[1])}")
    bounds = {True: FAST_BOUND + 2.0**-8, False: PRECISE_BOUND + 2.0**-8}
    assert {key: error for key, error in errors.items() if not error < bounds[key[2]]} == {}


# ---- layers ----------------------------------------------------------------------------------------------------------
def layer_state(name, fp8_format, device):
    return Fp8LayerState(Fp8Setup(RECIPES[name], gradient_dtype(fp8_format))).to(device)


def layer_results(name, fp8_format, device, is_grouped):
    """Output, input gradient and main gradients of two microbatches."""
    counts, (outs, ins) = [128, 0, 384], (256, 384)
    state, ends = layer_state(name, fp8_format, device), ends_of(counts, device)
    params = [torch.nn.Parameter(normal(outs, ins, seed=10 + i).to(device)) for i in range(3 if is_grouped else 1)]
    for param in params:
        param.main_grad = torch.zeros(outs, ins, device=device)
    found = []
    for seed in (1, 2):
        x = normal(sum(counts), ins, seed=seed).to(device).requires_grad_()
        out = fp8_grouped_linear(x, params, ends, state) if is_grouped else fp8_linear(x, params[0], state)
        out.backward(normal(sum(counts), outs, seed=seed + 5).to(device))
        found += [out.detach(), x.grad]
    return [part.cpu() for part in (*found, *(param.main_grad for param in params))]


@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "grouped"])
@pytest.mark.parametrize("fp8_format", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_layers_agree_with_the_cpu(name, fp8_format, is_grouped):
    cpu, gpu = (layer_results(name, fp8_format, device, is_grouped) for device in ("cpu", "cuda"))
    errors = [relative(got, want) for got, want in zip(gpu, cpu, strict=True)]
    print(f"{name} {fp8_format} grouped={is_grouped}: {[f'{error:.1e}' for error in errors]}")
    assert max(errors) < FAST_BOUND + 2.0**-8


@pytest.mark.parametrize("fp8_format", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_grouped_layer_never_waits_and_replays_with_new_weights(name, fp8_format):
    state, ends = layer_state(name, fp8_format, "cuda"), ends_of([128, 0, 384], "cuda")
    params = [torch.nn.Parameter(normal(256, 384, seed=10 + i)) for i in range(3)]
    for param in params:
        param.main_grad = torch.zeros(256, 384, device="cuda")
    x, grad = normal(512, 384, seed=1).requires_grad_(), normal(512, 256, seed=2)

    def step():
        """One step of one microbatch: the weights are quantised in it."""
        state.forget_weight()
        out = fp8_grouped_linear(x, params, ends, state)
        (grad_x,) = torch.autograd.grad(out, x, grad, retain_graph=False, allow_unused=False)
        return out.detach(), grad_x

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    history = [buffer.clone() for buffer in state.buffers()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for buffer, value in zip(state.buffers(), history, strict=True):
        buffer.copy_(value)
    with torch.no_grad():
        for param in params:
            param.mul_(1.5)
    graph.replay()
    replayed = [part.clone() for part in captured]
    for buffer, value in zip(state.buffers(), history, strict=True):
        buffer.copy_(value)
    assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_only_codes_stay_between_forward_and_backward(name):
    state, ends = layer_state(name, "e4m3", "cuda"), ends_of([1024, 1024], "cuda")
    params = [torch.nn.Parameter(normal(512, 4096, seed=i)) for i in range(2)]
    outputs = [fp8_grouped_linear(normal(2048, 4096), params, ends, state)]  # weights are quantised here
    torch.cuda.synchronize()
    begin = torch.cuda.memory_allocated()
    outputs += [fp8_grouped_linear(normal(2048, 4096, seed=seed), params, ends, state) for seed in range(1, 5)]
    grown = (torch.cuda.memory_allocated() - begin) / 4
    codes, result = 2048 * 4096, 2048 * 512 * 2
    print(f"{name}: {grown / 2**20:.2f} MiB per microbatch, codes {codes / 2**20:.2f}, output {result / 2**20:.2f}")
    assert codes + result <= grown < 1.1 * codes + result


# ---- speed -----------------------------------------------------------------------------------------------------------
def test_benchmark_prints_the_speed():
    assert benchmark.main(["--what", "products", *FOLDER]) == 0


@pytest.mark.parametrize("what", ["quantise", "casts", "swiglu"])
def test_benchmark_times_quantisers(what):
    assert benchmark.main(["--what", what, *FOLDER]) == 0


def test_benchmark_sweeps_cuts_for_few_rows():
    words = ["--what", "sweep", "--shapes", "A fc1 one GPU", "--recipes", "rowwise"]
    assert benchmark.main([*words, *FOLDER]) == 0


def test_benchmark_sweeps_cuts():
    assert benchmark.main(["--what", "sweep", *FOLDER]) == 0
