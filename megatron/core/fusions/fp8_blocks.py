"""One scale for a block of elements, inside kernels: the bits of `core/fp8/quantize`, interpreted and native.

    factor = 448 / amax, cut to a power of two    code = e4m3(x * factor)    scale = 1 / factor    x ~ code * scale

Magnitudes are compared as integers: for floats without sign the order is the same, an infinity stands above all finite
numbers and NaN above it, so that neither is lost.
"""

# ruff: noqa: ANN001, ANN201 (a compiled kernel takes no annotations but tl.constexpr)
from megatron.core.fusions.triton_casts import from_e4m3, to_e4m3, to_e5m2
from megatron.core.optional_deps import tl, triton_jit


@triton_jit
def magnitude(x):
    """Fp32 [...] -> int32 [...] of the same order as |x|."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton_jit
def codes_of(x, factor, IS_E5M2: tl.constexpr, INTERPRETED: tl.constexpr):
    """Fp32 x [...], factor that fits it -> codes uint8 [...]; NaN for what is not finite."""
    scaled = x * factor
    scaled = tl.where(magnitude(scaled) >= 0x7F800000, float("nan"), scaled)
    if IS_E5M2:
        code = to_e5m2(scaled, INTERPRETED).to(tl.uint8, bitcast=True)
    else:
        code = to_e4m3(scaled, INTERPRETED).to(tl.uint8, bitcast=True)
    return tl.where(scaled != scaled, 0x7F, code).to(tl.uint8)  # one pattern for every NaN


@triton_jit
def block_factor(bits, MAX_CODE: tl.constexpr):
    """Largest magnitudes int32 [...] -> factors fp32 [...], powers of two; NaN where a magnitude is not finite."""
    amax = bits.to(tl.float32, bitcast=True)
    factor = tl.minimum(tl.div_rn(tl.full(amax.shape, MAX_CODE, tl.float32), amax), 8.507059173023462e37)  # 2^126
    factor = tl.where(bits > 0, factor, 1.0)
    factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(bits >= 0x7F800000, float("nan"), factor)


@triton_jit
def inverse(factor):
    """1 / factor, fp32 [...], of powers of two: the exponent with its sign turned."""
    turned = (254 << 23) - factor.to(tl.int32, bitcast=True)
    return tl.where(factor != factor, factor, turned.to(tl.float32, bitcast=True))


@triton_jit
def pack_blocks(x, INTERPRETED: tl.constexpr):
    """Fp32 blocks x [m, 128] -> e4m3 codes uint8 [m, 128], scales fp32 [m]."""
    factor = block_factor(tl.max(magnitude(x), axis=1), 448.0)
    return codes_of(x, factor[:, None], False, INTERPRETED), inverse(factor)


@triton_jit
def unpack_blocks(codes, scales, INTERPRETED: tl.constexpr):
    """E4m3 codes uint8 [m, 128], scales fp32 [m] -> the values fp32 [m, 128]."""
    return from_e4m3(codes, INTERPRETED) * scales[:, None]
