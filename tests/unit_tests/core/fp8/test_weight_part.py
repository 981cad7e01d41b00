"""Stretches of a weight, quantised apart, have the codes and scales of the whole one."""

import itertools

import pytest
import torch

from megatron.core.fp8.operand import quantize_weight
from megatron.core.fp8.quantize import AmaxHistory
from megatron.core.fp8.recipes import FORWARD_DTYPE, RECIPES
from megatron.core.fp8.weight_part import WeightGrid, operand_of_codes, weight_factors

SHAPES = [(9, 125), (130, 257), (256, 128)]


def history(past):
    return AmaxHistory(torch.tensor(past), torch.zeros(()), margin=1)


def in_stretches(weights, recipe, borders, known):
    """As ranks do that hold the stretches between `borders`, fractions of each weight."""
    grids = [WeightGrid(*weight.shape, recipe.weight_block) for weight in weights]
    tables, codes = [], []
    ends = [[int(fraction * weight.numel()) for fraction in borders] for weight in weights]
    for grid, weight, cuts in zip(grids, weights, ends, strict=True):
        table = torch.zeros(grid.shape)
        for begin, end in itertools.pairwise(cuts):
            own = torch.zeros(grid.shape)
            grid.note_amaxes(own, weight.flatten()[begin:end], begin)
            table = torch.maximum(table.view(torch.int32), own.view(torch.int32)).view(torch.float32)
        tables.append(table)
    factors = weight_factors(tables, recipe, known)
    for grid, weight, cuts, factor in zip(grids, weights, ends, factors, strict=True):
        flat = weight.flatten()
        parts = [grid.codes(flat[b:e], b, factor).view(torch.uint8) for b, e in itertools.pairwise(cuts)]
        codes.append(torch.cat(parts).view(FORWARD_DTYPE).view(weight.shape))
    return operand_of_codes(codes, factors, recipe, is_grouped=len(weights) > 1)


def assert_equal(got, expected):
    for one, other in ((got.by_row, expected.by_row), (got.by_column, expected.by_column)):
        assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
        assert one.scale.shape == other.scale.shape
        torch.testing.assert_close(one.scale, other.scale, rtol=0, atol=0, equal_nan=True)
        assert one.block == other.block


@pytest.mark.parametrize("num_weights", [1, 3])
@pytest.mark.parametrize("past", [0.0, 2.5])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_stretches_have_the_bits_of_the_whole(name, past, num_weights):
    recipe = RECIPES[name]
    generator = torch.Generator().manual_seed(3)
    for shape in SHAPES:
        weights = [torch.randn(shape, generator=generator).bfloat16() * 2**i for i in range(num_weights)]
        weights[-1][0, -1] = 0.0
        whole = torch.stack(weights) if num_weights > 1 else weights[0]
        known, same = (history(past) if recipe.uses_history else None for _ in range(2))
        expected = quantize_weight(whole, recipe, FORWARD_DTYPE, known)
        assert_equal(in_stretches(weights, recipe, (0, 0.13, 0.131, 0.7, 1), same), expected)
        assert known is None or torch.equal(known.noted, same.noted)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_what_is_not_finite_poisons_the_same_codes(name, value):
    weight = torch.ones(140, 140, dtype=torch.bfloat16)
    weight[3, 4] = value
    got = in_stretches([weight], RECIPES[name], (0, 0.3, 1), None)
    assert_equal(got, quantize_weight(weight, RECIPES[name], FORWARD_DTYPE))
