"""Rounding inside Triton kernels, with the same bits on a GPU and under the interpreter.

The interpreter is no reference for narrow floats: it cuts fp32 to bf16 instead of rounding, and its e4m3 is wrong near
and past the end of the range. Kernels therefore round through the functions below. Natively they are the hardware's
conversion; interpreted they work on the integer bits:

    bf16   add half a unit of the last kept place, less one if that place is even, and cut: ties go to even
    e4m3   the same on the top three mantissa bits, for exponents down to -6; below, whole steps of 2^-9, rounded by
           adding and subtracting 2^23
    e5m2   the same on the top two mantissa bits, for exponents down to -14; below, whole steps of 2^-16

e4m3 is clamped to +-448 first: the format has no infinity, and a cast of what lies beyond is NaN. e5m2 is clamped to
+-57344, so that it saturates as well. NaN stays NaN.

A kernel takes `INTERPRETED: tl.constexpr` and its launcher passes `is_interpreted()`.
"""

# ruff: noqa: ANN001, ANN201 (a compiled kernel takes no annotations but tl.constexpr)
# ruff: noqa: RET505 (and it needs both branches of a constant condition)
from megatron.core import env
from megatron.core.optional_deps import tl, triton_jit

E4M3_MAX = 448.0
E5M2_MAX = 57344.0


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
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """Fp32 [...] -> float8_e4m3fn, clamped to +-448, to nearest, ties to even."""
    clamped = tl.where(x != x, x, tl.minimum(tl.maximum(x, -448.0), 448.0))
    if INTERPRETED:
        bits = clamped.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        steps = (tl.abs(clamped) * 512.0 + 8388608.0) - 8388608.0
        code = tl.where(magnitude < ((127 - 6) << 23), steps.to(tl.uint32), normal)
        code = tl.where(x != x, 0x7F, code) | ((bits >> 31) << 7)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return clamped.to(tl.float8e4nv)


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
def to_e5m2(x, INTERPRETED: tl.constexpr):
    """Fp32 [...] -> float8_e5m2, clamped to +-57344, to nearest, ties to even."""
    clamped = tl.where(x != x, x, tl.minimum(tl.maximum(x, -57344.0), 57344.0))
    if INTERPRETED:
        bits = clamped.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21) - ((127 - 15) << 2)
        steps = (tl.abs(clamped) * 65536.0 + 8388608.0) - 8388608.0
        code = tl.where(magnitude < ((127 - 14) << 23), steps.to(tl.uint32), normal)
        code = tl.where(x != x, 0x7F, code) | ((bits >> 31) << 7)
        return code.to(tl.uint8).to(tl.float8e5, bitcast=True)
    else:
        return clamped.to(tl.float8e5)


@triton_jit
def narrow(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round a sum [...] to the dtype in which it leaves the kernel."""
    if tl.bfloat16 == DTYPE:
        return to_bf16(x, INTERPRETED)
    else:
        return x.to(DTYPE)
