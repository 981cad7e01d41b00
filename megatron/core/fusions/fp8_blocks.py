"""One scale for a block of elements, inside kernels: the bits of `core/fp8/quantize`, interpreted and native.

    factor = 448 / amax, cut to a power of two    code = e4m3(x * factor)    scale = 1 / factor    x ~ code * scale

Magnitudes are compared as integers: for floats without sign the order is the same, an infinity stands above all finite
numbers and NaN above it, so that neither is lost.
"""

# ruff: noqa: ANN001, ANN201 (a compiled kernel takes no annotations but tl.constexpr)
from megatron.core.fusions.triton_casts import from_e4m3, to_fp8
from megatron.core.optional_deps import tl, triton_jit


@triton_jit
def magnitude(x):
    """Fp32 [...] -> int32 [...] of the same order as |x|."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton_jit
def codes_of(scaled, CHECKS: tl.constexpr, IS_E5M2: tl.constexpr, INTERPRETED: tl.constexpr):
    """Scaled fp32 [...] -> codes uint8 [...]; CHECKS: infinities become NaN here, else the factor has seen to it."""
    if CHECKS:
        scaled = tl.fma(scaled, 0.0, scaled)
    code = to_fp8(scaled, IS_E5M2, INTERPRETED).to(tl.uint8, bitcast=True)
    if INTERPRETED:  # natively a result that is NaN has no sign, and its code is this one
        code = tl.where(scaled != scaled, 0x7F, code).to(tl.uint8)
    return code


@triton_jit
def block_factor(bits, IS_E5M2: tl.constexpr):
    """Bits of amaxes int32 [...] -> factors and scales fp32 [...]: the largest power of two below max / amax.

    Both formats end at 1.75 * 2^k: an amax above 1.75 in its own binary order costs one power more.
    """
    order = (bits + 0x1FFFFF) >> 23
    exponent = tl.minimum((254 + 15 if IS_E5M2 else 254 + 8) - order, 127 + 126)
    exponent = tl.where(bits > 0, exponent, 127)
    factor = tl.where(bits >= 0x7F800000, 0x7FC00000, exponent << 23)
    scale = tl.where(bits >= 0x7F800000, 0x7FC00000, (254 - exponent) << 23)
    return factor.to(tl.float32, bitcast=True), scale.to(tl.float32, bitcast=True)


@triton_jit
def pack_blocks(x, INTERPRETED: tl.constexpr):
    """Fp32 blocks x [m, 128] -> e4m3 codes uint8 [m, 128], scales fp32 [m]."""
    factor, scale = block_factor(tl.max(magnitude(x), axis=1), False)
    return codes_of(x * factor[:, None], False, False, INTERPRETED), scale


@triton_jit
def unpack_blocks(codes, scales, INTERPRETED: tl.constexpr):
    """E4m3 codes uint8 [m, 128], scales fp32 [m] -> the values fp32 [m, 128]."""
    return from_e4m3(codes, INTERPRETED) * scales[:, None]
