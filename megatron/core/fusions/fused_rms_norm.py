"""RMS norm with the residual stream around it, as one kernel in each direction.

    forward    t = x + residual,   r = 1 / sqrt(mean(t^2) + eps),   y = t r w        reads x, residual; writes t, y
    backward   u = dy w,   n = t r,   dx = d residual = (u - n mean(u n)) r + dt     reads t, dy, dt; writes dx
               dw = sum over rows of dy n

Without a residual t is x itself. A residual stream goes on beside the norm: `dt` is its gradient, and joining it here
saves autograd's own addition. The maths is fp32; t is rounded to the dtype of x before it is normalised, as an addition
of its own would do. The weight's gradient is added over fixed rows per program, then over programs in order: the same
bits every time.

Legend: T rows, h width, p programs.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.fused_row_layout import uses_kernels
from megatron.core.fusions.partial_sums import add_partial_sums
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

MAX_WIDTH = 16384
TILE = 2048
"""Elements of the table [rows, h] that a program holds, if a row is not longer."""
MAX_PROGRAMS, STAGES, WARP_ELEMENTS = 528, 3, 256
"""Of backward: programs, each of which leaves one partial sum of the weight's gradient, an H200 holds about as many;
blocks of rows that a program has under way at a time; elements of a block for each warp."""


@dataclass(frozen=True)
class NormRule:
    """What a norm adds."""

    eps: float
    """To the mean square."""

    offset: float = 0.0
    """To the weight: 1 for a zero-centred one."""


def uses_norm_kernels(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> bool:
    """True where the kernels can run: x and residual [..., h] of one dtype below fp64 on a GPU, weight [h]."""
    is_wide = torch.float64 in (x.dtype, weight.dtype)
    is_same = residual is None or residual.dtype == x.dtype
    return uses_kernels(x) and not is_wide and is_same and weight.shape[0] <= MAX_WIDTH


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, rule: NormRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x + residual, and that sum: x, residual [..., h], weight [h] -> [..., h] twice.

    Dtype:  the norm has the dtype of the weight, the sum that of `x`. Without a residual the sum is a view of `x`.
    Memory: keeps the sum and one fp32 number for each row.
    """
    return _AddNorm.apply(x, residual, weight, rule)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, rule: NormRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        normed, total, scales = norm_forward(
            rows, None if residual is None else residual.reshape(rows.shape), weight, rule
        )
        ctx.save_for_backward(total, scales, weight)
        ctx.rule, ctx.has_residual = rule, residual is not None
        ctx.set_materialize_grads(False)
        return normed.view(x.shape), x.view_as(x) if residual is None else total.view(x.shape)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_total: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        total, scales, weight = ctx.saved_tensors
        if grad is None:
            return grad_total, grad_total if ctx.has_residual else None, None, None
        flat = None if grad_total is None else grad_total.reshape(total.shape)
        grad_x, grad_weight = norm_backward(grad.reshape(total.shape), flat, total, scales, weight, ctx.rule)
        grad_x = grad_x.view(grad.shape)
        return grad_x, grad_x if ctx.has_residual else None, grad_weight, None


def norm_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, rule: NormRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """X, residual [T, h], weight [h] -> norm [T, h], sum [T, h] (x itself without a residual), scales fp32 [T]."""
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    (num_rows, width), (rows, columns) = x.shape, _tile(x.shape[1])
    normed = x.new_empty(x.shape, dtype=weight.dtype)
    total = x if residual is None else torch.empty_like(x)
    scales = x.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        streams.declare("norm", (x, residual, weight), (normed, total, scales))
        _forward_kernel[(-(-num_rows // rows),)](
            x,
            residual,
            weight,
            normed,
            total,
            scales,
            num_rows,
            width,
            rule.eps,
            rule.offset,
            interpreted=is_interpreted(),
            rows=rows,
            columns=columns,
            num_warps=_warps(columns),
        )
    return normed, total, scales


def norm_backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    rule: NormRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grad of the norm, grad of the sum, sum [T, h], scales fp32 [T], weight [h] -> grad of x [T, h], of weight [h]."""
    grad, grad_total = grad.contiguous(), None if grad_total is None else grad_total.contiguous()
    (num_rows, width), (rows, columns) = total.shape, _tile(total.shape[1])
    num_programs = min(-(-num_rows // rows), MAX_PROGRAMS)
    grad_x = torch.empty_like(total)
    partial = total.new_empty(num_programs, width, dtype=torch.float32)
    if num_rows:
        read = (grad, grad_total, total, scales, weight)
        streams.declare("gradient of a norm", read, (grad_x, partial))
        _backward_kernel[(num_programs,)](
            *read,
            grad_x,
            partial,
            num_rows,
            width,
            rule.offset,
            interpreted=is_interpreted(),
            rows=rows,
            columns=columns,
            stages=STAGES,
            num_warps=max(4, min(16, rows * columns // WARP_ELEMENTS)),
        )
    return grad_x, add_partial_sums(partial.unsqueeze(0), weight.dtype).squeeze(0)


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program, powers of two."""
    columns = max(16, 1 << (width - 1).bit_length())
    return max(1, TILE // columns), columns


def _warps(columns: int) -> int:
    return 4 if columns <= 2048 else 8 if columns <= 8192 else 16


@triton_jit
def _forward_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    scales,
    num_rows,
    width,
    eps,
    offset,
    interpreted: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Some rows: x, residual [T, h], weight [h] -> normed, total [T, h], scales [T]."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    entry = row.to(tl.int64)[:, None] * width + column[None, :]
    is_entry = (row < num_rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + entry, mask=is_entry, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + entry, mask=is_entry, other=0.0).to(tl.float32)
        rounded = narrow(value, total.dtype.element_ty, interpreted)
        tl.store(total + entry, rounded, mask=is_entry)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(scales + row, scale, mask=row < num_rows)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    result = value * scale[:, None] * factor[None, :]
    tl.store(normed + entry, narrow(result, normed.dtype.element_ty, interpreted), mask=is_entry)


@triton_jit
def _backward_kernel(
    grad,
    grad_total,
    total,
    scales,
    weight,
    grad_x,
    partial,
    num_rows,
    width,
    offset,
    interpreted: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    stages: tl.constexpr,
):
    """Every p-th block of rows: gradients [T, h], total [T, h], scales [T] -> grad_x [T, h], a part of [p, h]."""
    column = tl.arange(0, columns)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    sums = tl.zeros([rows, columns], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, rows), tl.num_programs(0), num_stages=stages):
        row = block * rows + tl.arange(0, rows)
        entry = row.to(tl.int64)[:, None] * width + column[None, :]
        is_entry = (row < num_rows)[:, None] & (column < width)[None, :]
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)[:, None]
        unit = tl.load(total + entry, mask=is_entry, other=0.0).to(tl.float32) * scale
        given = tl.load(grad + entry, mask=is_entry, other=0.0).to(tl.float32)
        if grad_total is not None:  # read before the sums along a row, which all warps wait for
            passed = tl.load(grad_total + entry, mask=is_entry, other=0.0).to(tl.float32)
        sums += given * unit
        wanted = given * factor[None, :]
        value = (wanted - unit * (tl.sum(wanted * unit, 1) / width)[:, None]) * scale
        if grad_total is not None:
            value += passed
        tl.store(grad_x + entry, narrow(value, grad_x.dtype.element_ty, interpreted), mask=is_entry)
    tl.store(partial + tl.program_id(0) * width + column, tl.sum(sums, 0), mask=column < width)
