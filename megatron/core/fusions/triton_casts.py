"""Rounding inside Triton kernels, with the same bits on a GPU and under the interpreter.

The interpreter is no reference for narrow floats: it cuts fp32 to bf16 instead of rounding, and its e4m3 is wrong near
and past the end of the range. Kernels therefore round through the functions below. Natively they are the hardware's
conversion; interpreted they work on the integer bits:

    bf16   add half a unit of the last kept place, less one if that place is even, and cut: ties go to even
    e4m3   the same on the top three mantissa bits, for exponents down to -6; below, whole steps of 2^-9, rounded by
           adding and subtracting 2^23
    e5m2   the same on the top two mantissa bits, for exponents down to -14; below, whole steps of 2^-16

Both saturate: what lies beyond +-448 (e4m3) or +-57344 (e5m2) becomes the largest code. NaN stays NaN.

A kernel takes `INTERPRETED: tl.constexpr` and its launcher passes `is_interpreted()`.
"""

# ruff: noqa: ANN001, ANN201 (a compiled kernel takes no annotations but tl.constexpr)
# ruff: noqa: RET505 (and it needs both branches of a constant condition)
from megatron.core import env
from megatron.core.optional_deps import tl, triton_jit


def is_interpreted() -> bool:
    """True if Triton kernels run in Python on the CPU, which is decided when they are defined."""
    return env.triton_interpret()


@triton_jit
def to_bf16(x, INTERPRETED: tl.constexpr):
    """Fp32 [...] -> bf16, to nearest, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton_jit
def to_fp8(x, IS_E5M2: tl.constexpr, INTERPRETED: tl.constexpr):
    """Fp32 [...] -> float8_e4m3fn or float8_e5m2, saturating, to nearest, ties to even."""
    if INTERPRETED:
        CUT: tl.constexpr = 21 if IS_E5M2 else 20  # bits that go
        LEAST: tl.constexpr = -14 if IS_E5M2 else -6  # exponent of the smallest normal number
        STEP: tl.constexpr = 65536.0 if IS_E5M2 else 512.0  # reciprocal of the smallest number
        LIMIT: tl.constexpr = 57344.0 if IS_E5M2 else 448.0
        clamped = tl.where(x != x, x, tl.minimum(tl.maximum(x, -LIMIT), LIMIT))
        bits = clamped.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        kept = (magnitude + ((1 << (CUT - 1)) - 1) + ((magnitude >> CUT) & 1)) >> CUT
        normal = kept - ((126 + LEAST) << (23 - CUT))
        steps = (tl.abs(clamped) * STEP + 8388608.0) - 8388608.0
        code = tl.where(magnitude < ((127 + LEAST) << 23), steps.to(tl.uint32), normal)
        code = (tl.where(x != x, 0x7F, code) | ((bits >> 31) << 7)).to(tl.uint8)
        return code.to(tl.float8e5, bitcast=True) if IS_E5M2 else code.to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e5) if IS_E5M2 else x.to(tl.float8e4nv)  # the conversion saturates


@triton_jit
def from_e4m3(code, INTERPRETED: tl.constexpr):
    """Codes of float8_e4m3fn as uint8 [...] -> the values, fp32."""
    if INTERPRETED:
        bits = code.to(tl.uint32)
        exponent, mantissa = (bits >> 3) & 0xF, bits & 0x7
        small = mantissa.to(tl.float32) * 0.001953125  # 2^-9
        large = ((exponent + 127 - 7) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
        value = tl.where(exponent == 0, small, large)
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
        return tl.where(bits >= 0x80, value * -1.0, value)  # a minus alone would lose that of zero
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton_jit
def narrow(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round a sum [...] to the dtype in which it leaves the kernel."""
    if tl.bfloat16 == DTYPE:
        return to_bf16(x, INTERPRETED)
    else:
        return x.to(DTYPE)
