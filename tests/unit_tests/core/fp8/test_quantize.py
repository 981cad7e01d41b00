"""The bits of quantisation: rounding, saturation, scales, error bounds."""

import math

import pytest
import torch

from megatron.core.fp8.quantize import factor_of, quantize_blocks, quantize_rows, quantize_tensor, to_codes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# (relative rounding error of a normal code, half the spacing of subnormal codes), from mantissa bits and exponent bias
ERRORS = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}


def sample(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    exponents = torch.randint(-20, 20, (rows, columns), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * 2.0**exponents).to(dtype)


def assert_within_bound(values: torch.Tensor, got: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    relative, absolute = ERRORS[dtype]
    bound = torch.maximum(values.double().abs() * relative, scale.double() * absolute) * (1 + 1e-6)
    assert ((values.double() - got.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_tensor_scale_error_is_bounded(dtype, source):
    values = sample(37, 53, source)
    quantized = quantize_tensor(values, dtype)
    assert_within_bound(values, quantized.dequantize(), quantized.scale, dtype)
    assert quantized.codes.float().abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_row_scale_error_is_bounded_by_the_row(dtype):
    values = sample(37, 53)
    quantized = quantize_rows(values, dtype)
    assert quantized.scale.shape == (37, 1)
    assert_within_bound(values, quantized.dequantize(), quantized.scale, dtype)


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (128, 1)])
def test_block_scales_are_powers_of_two_and_edges_are_blocks(block):
    values = sample(130, 257)
    quantized = quantize_blocks(values, E4M3, block)
    assert quantized.scale.shape == (math.ceil(130 / block[0]), math.ceil(257 / block[1]))
    assert (torch.frexp(quantized.scale).mantissa == 0.5).all()
    full = quantized.scale.repeat_interleave(block[0], 0)[:130].repeat_interleave(block[1], 1)[:, :257]
    assert_within_bound(values, quantized.dequantize(), full, E4M3)


def test_blocks_of_one_row_equal_a_hand_made_case():
    values = torch.zeros(1, 256)
    values[0, 0], values[0, 1], values[0, 128] = 448.0, 17.0, 2.0
    quantized = quantize_blocks(values, E4M3, (1, 128))
    assert quantized.scale.tolist() == [[1.0, 2.0**-7]]
    assert quantized.codes.float()[0, [0, 1, 128]].tolist() == [448.0, 16.0, 256.0]


@pytest.mark.parametrize(("dtype", "limit"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_codes_saturate_and_what_is_not_finite_is_nan(dtype, limit):
    values = torch.tensor([1e30, -1e30, limit, limit * 1.04, math.inf, -math.inf, math.nan])
    codes = to_codes(values, dtype)
    assert codes.float()[:4].tolist() == [limit, -limit, limit, limit]
    assert codes.view(torch.uint8)[4:].tolist() == [0x7F] * 3


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_poisons_its_group_only(bad):
    values = torch.ones(2, 256)
    values[1, 3] = bad
    rows = quantize_rows(values, E4M3).dequantize()
    assert torch.equal(rows[0], torch.ones(256))
    assert rows[1].isnan().all()
    blocks = quantize_blocks(values, E4M3, (1, 128)).dequantize()
    assert blocks[1, :128].isnan().all()
    assert torch.equal(blocks[1, 128:], torch.ones(128))
    assert quantize_tensor(values, E4M3).dequantize().isnan().all()


def test_factor_fills_the_range_less_the_margin():
    amax = torch.tensor([448.0, 1.0, 0.0, 1e-45, 3e38])
    assert factor_of(amax, E4M3).tolist() == [1.0, 448.0, 1.0, 2.0**126, pytest.approx(448 / 3e38)]
    assert factor_of(amax[:2], E4M3, margin=2).tolist() == [0.25, 112.0]
    assert factor_of(amax[:3], E4M3, power_of_two=True).tolist() == [1.0, 256.0, 1.0]


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_tensors_have_no_codes(shape):
    values = torch.zeros(shape)
    for quantized in (
        quantize_tensor(values, E4M3),
        quantize_rows(values, E4M3),
        quantize_blocks(values, E4M3, (1, 128)),
    ):
        assert quantized.codes.shape == shape
        assert quantized.dequantize().shape == shape


def test_every_code_survives_a_round_trip():
    for dtype in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = codes.float().isfinite()
        again = to_codes(codes.float(), dtype)
        assert torch.equal(again.view(torch.uint8)[finite], codes.view(torch.uint8)[finite])
