"""One step of Adam in one pass: read gradient, weight and moments; write weight, its rounding and the moments.

    g = grad / grad_scale                           clipping, where it divides
    w = w (1 - lr decay)    or    g = g + decay w   decay, decoupled or not
    m = b1 m + (1 - b1) g,     v = b2 v + (1 - b2) g^2
    w = w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

Products with the constants are fp64 and rounded to fp32 after each line, square root and quotients are exact fp32.
Torch's fused kernel works in fp32, in another order from version to version: the two agree within the rounding of fp32.
The gradient is only read, and nothing is written where `found_inf` is raised. It is memory that limits the kernel: 28
bytes for an element in fp32, 30 with a bf16 rounding.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.core import streams
from megatron.core.fusions.fused_row_layout import uses_kernels
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

BLOCK, WARPS = 1024, 8
"""Elements of a program, and its warps."""


@dataclass(frozen=True)
class AdamRule:
    """The numbers of a group of parameters."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    is_decoupled: bool


class AdamTensors(NamedTuple):
    """What is updated of one parameter of n elements; all contiguous."""

    param: torch.Tensor
    """fp32"""
    grad: torch.Tensor
    """fp32 or bf16"""
    exp_avg: torch.Tensor
    """fp32 or bf16"""
    exp_avg_sq: torch.Tensor
    """fp32 or bf16"""
    step: torch.Tensor
    """fp32 [], steps before this one"""
    rounded: torch.Tensor | None
    """the model's weight, which takes the rounding of the new one"""


class StepScalars(NamedTuple):
    """What a step decides on the device, fp32 of one element each."""

    lr: torch.Tensor
    grad_scale: torch.Tensor | None
    """what gradients are divided by"""
    found_inf: torch.Tensor | None
    """above 0: the step changes nothing"""


def has_adam_kernel(tensors: AdamTensors) -> bool:
    """True where the kernel runs: contiguous tensors [n] on a GPU, the weight in fp32."""
    is_flat = all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return uses_kernels(tensors.param) and tensors.param.dtype == torch.float32 and is_flat


def adam_step(tensors: AdamTensors, scalars: StepScalars, rule: AdamRule) -> None:
    """Update weight and moments [n] in place. Graph: capturable. The step count is the caller's to raise."""
    count = tensors.param.numel()
    if not count:
        return
    written = (tensors.param, tensors.exp_avg, tensors.exp_avg_sq, tensors.rounded)
    streams.declare("adam", (*tensors, *scalars), written)
    _adam_kernel[(-(-count // BLOCK),)](
        *tensors,
        *scalars,
        count,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        log_beta1=math.log(rule.betas[0]) if rule.betas[0] else -math.inf,
        log_beta2=math.log(rule.betas[1]) if rule.betas[1] else -math.inf,
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        decoupled=rule.is_decoupled,
        interpreted=is_interpreted(),
        block=BLOCK,
        num_warps=WARPS,
    )


@triton_jit
def _adam_kernel(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    step,
    rounded,
    lr,
    grad_scale,
    found_inf,
    count,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    log_beta1: tl.constexpr,
    log_beta2: tl.constexpr,
    eps: tl.constexpr,
    weight_decay: tl.constexpr,
    decoupled: tl.constexpr,
    interpreted: tl.constexpr,
    block: tl.constexpr,
):
    """One block of param, grad, exp_avg, exp_avg_sq, rounded [n]; the others are numbers."""
    if found_inf is not None:
        count = tl.where(tl.load(found_inf) > 0.0, 0, count)
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = place < count
    given = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(param + place, mask=mask, other=0.0)
    mean = tl.load(exp_avg + place, mask=mask, other=0.0).to(tl.float64)
    square = tl.load(exp_avg_sq + place, mask=mask, other=0.0).to(tl.float64)
    rate = tl.load(lr).to(tl.float64)
    number = tl.load(step).to(tl.float64) + 1.0
    correction = (1.0 - tl.exp(number * log_beta1)).to(tl.float32)
    root_correction = tl.sqrt(1.0 - tl.exp(number * log_beta2)).to(tl.float32)
    if grad_scale is not None:
        given = tl.div_rn(given, tl.load(grad_scale))
    if weight_decay != 0.0:
        if decoupled:
            weight = (weight.to(tl.float64) - rate * weight_decay * weight.to(tl.float64)).to(tl.float32)
        else:
            given = (given.to(tl.float64) + weight.to(tl.float64) * weight_decay).to(tl.float32)
    wide = given.to(tl.float64)
    mean = (beta1 * mean + (1.0 - beta1) * wide).to(tl.float32)
    square = (beta2 * square + (1.0 - beta2) * wide * wide).to(tl.float32)
    step_size = (rate / correction.to(tl.float64)).to(tl.float32)
    divisor = tl.div_rn(tl.sqrt_rn(square), root_correction).to(tl.float64) + eps
    weight -= tl.div_rn(step_size * mean, divisor.to(tl.float32))
    tl.store(param + place, weight, mask=mask)
    tl.store(exp_avg + place, narrow(mean, exp_avg.dtype.element_ty, interpreted), mask=mask)
    tl.store(exp_avg_sq + place, narrow(square, exp_avg_sq.dtype.element_ty, interpreted), mask=mask)
    if rounded is not None:
        tl.store(rounded + place, narrow(weight, rounded.dtype.element_ty, interpreted), mask=mask)
