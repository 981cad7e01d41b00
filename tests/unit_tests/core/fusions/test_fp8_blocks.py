"""One scale for a block: powers of two below the largest code over the amax, codes that are torch's, and back."""

import math

import torch

from megatron.core.fusions.fp8_blocks import block_factor, magnitude, pack_blocks, unpack_blocks
from megatron.core.fusions.triton_casts import is_interpreted
from megatron.core.optional_deps import tl, triton_jit

COUNT = 256


@triton_jit
def factor_kernel(amaxes, factors, scales, IS_E5M2: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    factor, scale = block_factor(magnitude(tl.load(amaxes + at)), IS_E5M2)
    tl.store(factors + at, factor)
    tl.store(scales + at, scale)


@triton_jit
def block_kernel(x, codes, scales, back, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    row = tl.arange(0, ROWS)
    at = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    code, scale = pack_blocks(tl.load(x + at), INTERPRETED)
    tl.store(codes + at, code)
    tl.store(scales + row, scale)
    tl.store(back + at, unpack_blocks(code, scale, INTERPRETED))


def factor_job(amaxes, is_e5m2):
    """Factors and scales of amaxes [COUNT]."""
    factor, scale = torch.empty_like(amaxes), torch.empty_like(amaxes)
    factor_kernel[(1,)](amaxes, factor, scale, is_e5m2, COUNT)
    return factor, scale


def block_job(x):
    """Codes, scales and values again of blocks x [m, 128]."""
    codes, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x))
    back = torch.empty_like(x)
    block_kernel[(1,)](x, codes, scales, back, len(x), is_interpreted())
    return codes, scales, back


def amaxes():
    """Numbers of many orders, with those where the power changes and their neighbours."""
    edges = torch.tensor([1.75 * 2.0**k for k in range(-40, 40)])
    near = torch.cat([edges, *(torch.nextafter(edges, torch.tensor(side)) for side in (0.0, math.inf))])
    return torch.cat([near, torch.rand(COUNT - len(near), generator=torch.Generator().manual_seed(2)) * 100 + 1e-3])


def test_factor_is_the_largest_power_of_two_that_keeps_the_amax_a_code(interpreted):
    x = amaxes()
    for is_e5m2, largest in ((False, 448.0), (True, 57344.0)):
        factor, scale = interpreted(factor_job, x, is_e5m2)
        assert torch.equal(factor.log2(), factor.log2().round())
        assert bool((x.double() * factor <= largest).all())
        assert bool((x.double() * factor * 2 > largest).all())
        assert torch.equal(scale, 1 / factor)


def test_factor_of_nothing_is_one_and_of_no_number_is_nan(interpreted):
    x = torch.ones(COUNT)
    x[0], x[1], x[2], x[3] = 0.0, math.inf, math.nan, -2.0
    factor, scale = interpreted(factor_job, x, False)
    assert (factor[0], factor[3], factor[4]) == (1.0, 128.0, 256.0)
    assert factor[1:3].isnan().all()
    assert scale[1:3].isnan().all()


def test_codes_are_those_of_torch_and_come_back_within_half_a_step(interpreted):
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    codes, scales, back = interpreted(block_job, x)
    expected = (x / scales[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert torch.equal(back, expected.float() * scales[:, None])
    assert bool(((back - x).abs() <= x.abs() / 16 + scales[:, None] * 2.0**-10).all())
