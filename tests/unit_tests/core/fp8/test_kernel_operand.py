"""The quantisation kernels under the interpreter have the bits of the plain form; natively a GPU test says the same."""

import math

import pytest
import torch

from megatron.core.fp8.kernel_operand import kernel_activation, kernel_weight
from megatron.core.fp8.plain_operand import factor_from_history, plain_activation, plain_amax, plain_weight
from megatron.core.fp8.quantize import AmaxHistory, Operand
from megatron.core.fp8.recipes import RECIPES
from tests.common.fp8 import COUNTS, UNEVEN, activation, ends_of, parts_of, same_bits, weights

NAMES = [name for name in RECIPES if name != "delayed"]
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def activation_job(recipe: str, dtype: str, counts, source, bad=None):
    values, ends = activation(counts, source, bad=bad), ends_of(counts)
    return parts_of(kernel_activation(values, RECIPES[recipe], DTYPES[dtype], ends))


def weight_job(recipe: str, shape):
    return parts_of(kernel_weight(weights(*shape), RECIPES[recipe], torch.float8_e4m3fn))


def history_of(past: float, noted: float = 0.0) -> AmaxHistory:
    return AmaxHistory(torch.tensor(past), torch.tensor(noted), margin=1)


def delayed_job(counts, bad, past):
    """Codes of activations and weights, and the two amaxes noted."""
    values, ends = activation(counts, torch.bfloat16, bad=bad), ends_of(counts)
    histories = history_of(past), history_of(past, 3.0)
    of_values = kernel_activation(values, RECIPES["delayed"], torch.float8_e5m2, ends, histories[0])
    of_weight = kernel_weight(weights(2, 32, 48), RECIPES["delayed"], torch.float8_e4m3fn, histories[1])
    return parts_of(of_values), parts_of(of_weight), [float(history.noted) for history in histories]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_codes_and_scales_of_activations(interpreted, recipe, dtype, counts):
    values, ends = activation(counts, torch.bfloat16), ends_of(counts)
    plain = plain_activation(values, RECIPES[recipe], DTYPES[dtype], ends)
    assert same_bits(interpreted(activation_job, recipe, dtype, counts, torch.bfloat16), parts_of(plain)) == []


@pytest.mark.parametrize(("recipe", "bad"), [("tensorwise", -math.inf), ("rowwise", math.inf), ("blockwise", math.nan)])
def test_what_is_not_finite_poisons_the_same_codes(interpreted, recipe, bad):
    values, ends = activation(COUNTS[0], torch.float32, bad=bad), ends_of(COUNTS[0])
    plain: Operand = plain_activation(values, RECIPES[recipe], torch.float8_e4m3fn, ends)
    got = interpreted(activation_job, recipe, "e4m3", COUNTS[0], torch.float32, bad)
    assert same_bits(got, parts_of(plain)) == []
    assert bool(plain.by_row.dequantize().isnan().any())


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("shape", [(3, 144, 160), (144, 160)], ids=str)
def test_codes_and_scales_of_weights(interpreted, recipe, shape):
    plain = plain_weight(weights(*shape), RECIPES[recipe], torch.float8_e4m3fn)
    assert same_bits(interpreted(weight_job, recipe, shape), parts_of(plain)) == []


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("past", [0.0, 1e-3, 64.0])
def test_delayed_scaling_notes_the_amax_and_saturates(interpreted, past, bad):
    counts, recipe = COUNTS[0], RECIPES["delayed"]
    values, ends, weight = activation(counts, torch.bfloat16, bad=bad), ends_of(counts), weights(2, 32, 48)
    factor = factor_from_history(values, torch.float8_e5m2, history_of(past), ends)
    of_values = plain_activation(values, recipe, torch.float8_e5m2, ends, factor)
    factor = factor_from_history(weight, torch.float8_e4m3fn, history_of(past))
    of_weight = plain_weight(weight, recipe, torch.float8_e4m3fn, factor)
    got_values, got_weight, noted = interpreted(delayed_job, counts, bad, past)
    assert same_bits(got_values, parts_of(of_values)) == []
    assert same_bits(got_weight, parts_of(of_weight)) == []
    want = torch.tensor([plain_amax(values, ends), max(3.0, plain_amax(weight))])
    torch.testing.assert_close(torch.tensor(noted), want, rtol=0, atol=0, equal_nan=True)


def one_way_job(recipe, by_row):
    values, ends = activation(COUNTS[0], torch.bfloat16), ends_of(COUNTS[0])
    operand = kernel_activation(values, RECIPES[recipe], torch.float8_e4m3fn, ends, by_row=by_row, by_column=not by_row)
    part = operand.by_row if by_row else operand.by_column
    return part.codes.view(torch.uint8), part.scale


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("recipe", NAMES)
def test_one_orientation_alone_has_the_same_bits(interpreted, recipe, by_row):
    plain = plain_activation(
        activation(COUNTS[0], torch.bfloat16), RECIPES[recipe], torch.float8_e4m3fn, ends_of(COUNTS[0])
    )
    want = plain.by_row if by_row else plain.by_column
    codes, scale = interpreted(one_way_job, recipe, by_row)
    assert torch.equal(codes, want.codes.view(torch.uint8))
    assert torch.equal(scale, want.scale)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_tiles_may_hold_several_experts(interpreted, recipe):
    plain = plain_activation(activation(UNEVEN, torch.bfloat16), RECIPES[recipe], torch.float8_e5m2, ends_of(UNEVEN))
    assert same_bits(interpreted(activation_job, recipe, "e5m2", UNEVEN, torch.bfloat16), parts_of(plain)) == []


def amax_orders():
    """Blocks whose largest values stand around the places where a power of two is lost, up to the ends of fp32."""
    values = torch.zeros(128, 128)
    at = torch.tensor([1.0, 1.75 - 2**-23, 1.75, 1.75 + 2**-23, 2 - 2**-23])
    values[:125, 0] = (at * 2.0 ** torch.arange(-100, 125, 9)[:, None]).flatten()
    values[125:, 0] = torch.tensor([torch.finfo(torch.float32).max, 2.0**-149, 2.977470608e38])
    return values


def orders_job(dtype):
    return parts_of(kernel_activation(amax_orders(), RECIPES["blockwise"], DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_are_those_of_the_division(interpreted, dtype):
    plain = plain_activation(amax_orders(), RECIPES["blockwise"], DTYPES[dtype])
    assert same_bits(interpreted(orders_job, dtype), parts_of(plain)) == []
