"""Rounding in Triton kernels: every code, every midpoint and its neighbours, against torch's own conversion."""

import pytest
import torch

from megatron.core.fusions.triton_casts import from_e4m3, is_interpreted, narrow, to_bf16, to_fp8
from megatron.core.optional_deps import tl, triton_jit

BLOCK = 32768
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton_jit
def cast_kernel(x, bf16, e4m3, e5m2, copy, count, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count)
    tl.store(bf16 + at, to_bf16(value, INTERPRETED), mask=at < count)
    tl.store(e4m3 + at, to_fp8(value, False, INTERPRETED), mask=at < count)
    tl.store(e5m2 + at, to_fp8(value, True, INTERPRETED), mask=at < count)
    tl.store(copy + at, narrow(value, copy.dtype.element_ty, INTERPRETED), mask=at < count)


def codes(dtype):
    """All values of a narrow format, as fp32."""
    bits, container = (16, torch.uint16) if dtype is torch.bfloat16 else (8, torch.uint8)
    return torch.arange(2**bits, dtype=torch.int32).to(container).view(dtype).float()


def around_midpoints(values):
    """The points half-way between neighbours, and the floats on both sides of them."""
    finite = values[values.isfinite()].double().sort().values
    middle = ((finite[1:] + finite[:-1]) / 2).float()
    infinity = torch.tensor(torch.inf)
    return [middle, torch.nextafter(middle, infinity), torch.nextafter(middle, -infinity)]


def cast_job(x, copy_dtype=torch.float32):
    """Round x [m] in a kernel to bf16, e4m3, e5m2 and another dtype."""
    device = "cpu" if is_interpreted() else "cuda"
    x = x.to(device)
    outputs = [torch.empty_like(x, dtype=dtype) for dtype in (torch.bfloat16, *FP8, copy_dtype)]
    grid = ((x.numel() + BLOCK - 1) // BLOCK,)
    cast_kernel[grid](x, *outputs, x.numel(), BLOCK, is_interpreted())
    bf16, e4m3, e5m2, copy = (out.cpu() for out in outputs)
    return bf16, (e4m3.view(torch.uint8), e5m2.view(torch.uint8)), copy  # plain pickle does not know float8


def assert_rounds_as_torch(dtype, call):
    x = torch.cat([codes(dtype), *around_midpoints(codes(dtype))])
    bf16, fp8, same = call(cast_job, x)
    is_nan = x.isnan()
    assert torch.equal(bf16.view(torch.int16)[~is_nan], x.bfloat16().view(torch.int16)[~is_nan])
    for narrow_dtype, found in zip(FP8, fp8, strict=True):
        limit = torch.finfo(narrow_dtype).max
        clamped = x.clamp(-limit, limit).to(narrow_dtype)
        assert torch.equal(found.view(torch.uint8)[~is_nan], clamped.view(torch.uint8)[~is_nan])
        assert found.view(narrow_dtype)[is_nan].float().isnan().all()
    assert torch.equal(same[~is_nan], x[~is_nan])
    assert bf16[is_nan].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8], ids=["bf16", "e4m3", "e5m2"])
def test_codes_and_midpoints_round_as_in_torch(interpreted, dtype):
    assert_rounds_as_torch(dtype, interpreted)


def test_narrow_takes_the_dtype_of_its_destination(interpreted):
    x = torch.tensor([1.0, 1.00390625, 1.0078125, -3.01171875])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(interpreted(cast_job, x, dtype)[2], x.to(dtype))


@triton_jit
def value_kernel(codes, values, INTERPRETED: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(values + at, from_e4m3(tl.load(codes + at), INTERPRETED))


def value_job(codes):
    """Codes uint8 [256] -> what they stand for."""
    device = "cpu" if is_interpreted() else "cuda"
    codes = codes.to(device)
    values = torch.empty(256, device=device)
    value_kernel[(1,)](codes, values, is_interpreted())
    return values.cpu()


def test_every_code_has_its_value(interpreted):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    values = interpreted(value_job, codes)
    assert torch.equal(values.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert torch.equal(values[is_number], expected[is_number])
    assert torch.equal(values[is_number].signbit(), expected[is_number].signbit())
