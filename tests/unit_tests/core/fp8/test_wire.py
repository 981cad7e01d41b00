"""Rows packed for the wire: error, size, and what a second quantisation does."""

import dataclasses

import pytest
import torch

from megatron.core.fp8 import wire
from megatron.core.fp8.operand import quantize_activation
from megatron.core.fp8.quantize import Operand
from megatron.core.fp8.recipes import RECIPES
from megatron.core.fp8.wire import pack_rows, unpack_rows
from tests.common.fp8 import spread

BLOCKWISE = RECIPES["blockwise"]


@pytest.mark.parametrize("width", [256, 200, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_values_arrive_within_the_bound(dtype, width):
    rows = spread(21, width, seed=width).to(dtype)
    got = unpack_rows(pack_rows(rows), width)
    assert (got.dtype, got.shape) == (dtype, rows.shape)
    for begin in range(0, width, 128):
        block = slice(begin, begin + 128)
        want = rows[:, block].double()
        bound = torch.maximum(want.abs() * 2.0**-4, want.abs().amax(1, keepdim=True) * 2.0**-9 / 448)
        assert ((got[:, block].double() - want).abs() <= bound * (1 + 1e-6)).all()


def test_a_row_takes_little_more_than_half():
    assert pack_rows(torch.zeros(3, 4096, dtype=torch.bfloat16)).shape == (3, 2112)


def test_rows_of_zeros_are_zeros_on_arrival():
    packed = torch.zeros_like(pack_rows(torch.ones(2, 256)))
    assert torch.equal(unpack_rows(packed, 256), torch.zeros(2, 256))


def test_no_rows_are_no_rows_on_arrival():
    packed = pack_rows(torch.zeros(0, 256, dtype=torch.bfloat16))
    assert packed.shape == (0, 132)
    assert unpack_rows(packed, 256).shape == (0, 256)


def test_scales_may_lie_strip_by_strip(monkeypatch):
    def turned(*args, **kwargs):
        rows = quantize_activation(*args, **kwargs).by_row
        by_strip = torch.empty_strided(rows.scale.shape, (1, len(rows.scale))).copy_(rows.scale)
        return Operand(dataclasses.replace(rows, scale=by_strip), None)

    rows = spread(7, 96, seed=1)
    want = pack_rows(rows)
    monkeypatch.setattr(wire, "quantize_activation", turned)
    assert torch.equal(pack_rows(rows).view(torch.uint8), want.view(torch.uint8))


def test_quantising_what_arrived_rounds_nothing():
    arrived = unpack_rows(pack_rows(spread(64, 256, seed=3).bfloat16()), 256)
    again = quantize_activation(arrived, BLOCKWISE, torch.float8_e4m3fn, by_column=False).by_row
    assert torch.equal(again.dequantize(), arrived.float())


def test_a_value_that_is_not_finite_arrives_as_nan():
    rows = torch.ones(2, 256)
    rows[1, 130] = torch.inf
    got = unpack_rows(pack_rows(rows), 256)
    assert got[1, 128:].isnan().all()
    assert not got[0].isnan().any()
