"""FP8 products against fp64: dense and grouped, each recipe, both formats."""

import pytest
import torch

from megatron.core.deferred_wgrad import WgradQueue, deferring
from megatron.core.fp8.layer_state import Fp8LayerState, Fp8Setup
from megatron.core.fp8.linear import fp8_grouped_linear, fp8_linear
from megatron.core.fp8.recipes import RECIPES, gradient_dtype

NAMES = list(RECIPES)
# Rounding a factor to e4m3 (e5m2) moves it by at most 2^-4 (2^-3) of itself; a product of two by the sum. Over a sum of
# terms with random signs the errors add up like the terms, so the relative error of the norm stays below that sum.
BOUND = {"e4m3": 2 * 2.0**-4, "hybrid": 2.0**-4 + 2.0**-3}


def setup(recipe: str, fp8_format: str = "e4m3", **options: bool) -> Fp8LayerState:
    return Fp8LayerState(Fp8Setup(RECIPES[recipe], gradient_dtype(fp8_format), **options))


def leaf(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", NAMES)
def test_dense_products_are_within_the_bound_of_fp64(recipe, fp8_format):
    x, weight, grad = leaf(160, 192, seed=1), torch.nn.Parameter(leaf(96, 192, seed=2)), leaf(160, 96, seed=3)
    out = fp8_linear(x.view(10, 16, 192), weight, setup(recipe, fp8_format)).view(160, 96)
    out.backward(grad)
    assert relative(out, x.double() @ weight.double().t()) < BOUND["e4m3"]
    assert relative(x.grad, grad.double() @ weight.double()) < BOUND[fp8_format]
    assert relative(weight.grad, grad.double().t() @ x.double()) < BOUND[fp8_format]
    assert relative(out, x.double() @ weight.double().t()) > 1e-3


@pytest.mark.parametrize("counts", [[128, 0, 256], [0, 0, 0], [48, 16, 16], [128]])
@pytest.mark.parametrize("recipe", NAMES)
def test_grouped_products_equal_a_dense_one_for_each_expert(recipe, counts):
    rows = RECIPES[recipe].row_multiple
    counts = [count // rows * rows for count in counts]
    x, grad = leaf(sum(counts) + 32, 128, seed=4), leaf(sum(counts) + 32, 160, seed=5)
    weights = [torch.nn.Parameter(leaf(160, 128, seed=6 + i)) for i in range(len(counts))]
    with torch.no_grad():
        x[sum(counts) :], grad[sum(counts) :] = torch.nan, torch.nan
    ends = torch.tensor(counts).cumsum(0)
    out = fp8_grouped_linear(x, weights, ends, setup(recipe))
    out.backward(grad)
    begin = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        assert weight.grad is not None
        if begin == end:
            assert not weight.grad.any()
            continue
        part = x.detach()[begin:end].requires_grad_()
        single = torch.nn.Parameter(weight.detach().clone())
        alone = fp8_linear(part, single, setup(recipe))
        alone.backward(grad[begin:end])
        if RECIPES[recipe].scaling.value == "tensor":
            assert relative(weight.grad, grad[begin:end].double().t() @ part.double()) < 0.125
        else:
            torch.testing.assert_close(out[begin:end], alone, rtol=0, atol=1e-4)
            torch.testing.assert_close(x.grad[begin:end], part.grad, rtol=0, atol=1e-4)
            torch.testing.assert_close(weight.grad, single.grad, rtol=0, atol=1e-4)
        begin = end


@pytest.mark.parametrize("recipe", NAMES)
def test_only_codes_are_kept_unless_wgrad_is_in_high_precision(recipe):
    x, weight = leaf(128, 128, seed=1), torch.nn.Parameter(leaf(128, 128, seed=2))
    for quantizes, expected in ((True, set()), (False, {x.untyped_storage().data_ptr()})):
        saved = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.add(t.untyped_storage().data_ptr()) or t, lambda t: t
        ):
            fp8_linear(x, weight, setup(recipe, quantizes_wgrad=quantizes))
        assert saved & {x.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr()} == expected


def test_weight_gradient_in_high_precision_is_exact():
    x, weight, grad = leaf(32, 16, seed=1), torch.nn.Parameter(leaf(48, 16, seed=2)), leaf(32, 48, seed=3)
    fp8_linear(x, weight, setup("tensorwise", quantizes_wgrad=False)).backward(grad)
    torch.testing.assert_close(weight.grad, grad.t() @ x)


def test_weights_are_quantised_once_until_forgotten():
    state, x, weight = setup("rowwise"), leaf(16, 16, seed=1), torch.nn.Parameter(leaf(16, 16, seed=2))
    first = fp8_linear(x, weight, state)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(fp8_linear(x, weight, state), first)
    state.forget_weight()
    assert torch.equal(fp8_linear(x, weight, state), 2 * first)


@pytest.mark.parametrize("recipe", NAMES)
def test_deferred_and_fused_weight_gradients_have_the_same_bits(recipe):
    results = []
    for is_deferred in (False, True):
        x, weights = leaf(256, 128, seed=1), [torch.nn.Parameter(leaf(128, 128, seed=s)) for s in (2, 3)]
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight)
        queue = WgradQueue()
        with deferring(queue if is_deferred else None):
            out = fp8_grouped_linear(x, weights, torch.tensor([128, 256]), setup(recipe))
        out.sum().backward()
        assert (len(queue) == 1) == is_deferred
        queue.flush()
        results.append([weight.main_grad for weight in weights])
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*results, strict=True))
