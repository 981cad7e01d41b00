"""The quantisation kernels under the interpreter have the bits of the plain form; natively a GPU test says the same."""

import math

import pytest
import torch

from megatron.core.fp8.kernel_operand import kernel_activation, kernel_amax, kernel_weight
from megatron.core.fp8.plain_operand import plain_activation, plain_amax, plain_weight
from megatron.core.fp8.quantize import Operand
from megatron.core.fp8.recipes import RECIPES
from tests.common.fp8 import COUNTS, activation, ends_of, parts_of, same_bits, weights

NAMES = [name for name in RECIPES if name != "delayed"]
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def activation_job(recipe: str, dtype: str, counts, source, bad=None):
    values, ends = activation(counts, source, bad=bad), ends_of(counts)
    return parts_of(kernel_activation(values, RECIPES[recipe], DTYPES[dtype], ends))


def weight_job(recipe: str, shape, factor=None):
    return parts_of(kernel_weight(weights(*shape), RECIPES[recipe], torch.float8_e4m3fn, factor))


def amax_job(counts, bad):
    return kernel_amax(activation(counts, torch.bfloat16, bad=bad), ends_of(counts))


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


def test_a_factor_from_a_history_saturates(interpreted):
    factor = torch.tensor(1e6)
    plain = plain_weight(weights(2, 32, 48), RECIPES["delayed"], torch.float8_e4m3fn, factor)
    assert same_bits(interpreted(weight_job, "delayed", (2, 32, 48), factor), parts_of(plain)) == []


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_amax_leaves_out_the_rows_behind_the_last_expert(interpreted, counts):
    bad = math.nan if counts is None else None
    want = plain_amax(activation(counts, torch.bfloat16, bad=bad), ends_of(counts))
    torch.testing.assert_close(interpreted(amax_job, counts, bad), want, rtol=0, atol=0, equal_nan=True)
