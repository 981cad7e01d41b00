"""SwiGLU of [gate; up] = x + bias, times a weight p of each row, in one kernel each for forward and backward.

    z = silu(gate) = gate * sigmoid(gate)        y      = z * up * p
                                                 d p    = sum_f dy * z * up
                                                 d up   = dy * p * z
                                                 d gate = dy * p * up * (sigmoid(gate) + z * (1 - sigmoid(gate)))

Arithmetic is fp32 from the operands to one rounding at the end. The sum of d p is taken in a fixed order: each lane
adds its columns from left to right, then the lanes are added pairwise, so that a run repeats bit for bit.

Both kernels are limited by memory. Forward reads x once and writes y; backward reads x and dy and writes d x. A row may
have any stride. Rows are independent: what is computed of garbage stays in its row.

`swiglu` and `swiglu_gradients` are the arithmetic alone, for other kernels to call.

Legend: R rows, f inner width.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.fused_row_layout import uses_kernels
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

FORWARD_TILE, BACKWARD_TILE = 2048, 1024
"""Elements of y that a program holds at a time."""

FORWARD_WARPS, BACKWARD_WARPS = 4, 4

WIDE = 2048
"""From this inner width on a tile lies in fewer rows, so that long rows are shared by more lanes."""


def has_swiglu_kernel(x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor | None) -> bool:
    """True if the kernels run: x [..., 2f] on a GPU, nothing in fp64, bias [2f] in the dtype of x; probs [R]."""
    is_double = torch.float64 in (x.dtype, None if probs is None else probs.dtype)
    return uses_kernels(x) and not is_double and (bias is None or bias.dtype == x.dtype)


def fused_swiglu(x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor | None) -> torch.Tensor:
    """Return silu(gate) * up * p by the kernels, with gradients.

    Shapes: x [..., 2f], bias [2f] or None, probs [R] or None for ones, R the rows of x -> [..., f].
    Graph:  capturable.
    Memory: keeps x, bias and probs.
    Grad:   all three; that of the bias is summed from the rounded gradient of x.
    """
    return _FusedSwiglu.apply(x, bias, probs)


class _FusedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, bias, probs)
        return kernel_swiglu(x, bias, probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, probs = ctx.saved_tensors
        grad_x, grad_probs = kernel_swiglu_backward(grad, x, bias, probs)
        grad_bias = grad_x.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, grad_probs


def kernel_swiglu(x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor | None) -> torch.Tensor:
    """The forward kernel: x [..., 2f], bias [2f] or None, probs [R] or None -> [..., f] in the dtype of x."""
    rows, width = _as_rows(x), x.shape[-1] // 2
    bias, probs = (None if operand is None else operand.contiguous() for operand in (bias, probs))
    out = x.new_empty(*x.shape[:-1], width)
    if out.numel():
        num_rows, columns = _tile(width, FORWARD_TILE)
        grid = (-(-len(rows) // num_rows) * -(-width // columns),)
        streams.declare("swiglu", (rows, bias, probs), (out,))
        shape = (len(rows), width, rows.stride(0), num_rows, columns)
        _forward_kernel[grid](rows, bias, probs, out, *shape, is_interpreted(), num_warps=FORWARD_WARPS)
    return out


def kernel_swiglu_backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The backward kernel: grad [..., f] and the operands of forward -> d x [..., 2f], d probs [R] or None."""
    rows, grads, width = _as_rows(x), _as_rows(grad), x.shape[-1] // 2
    bias, probs = (None if operand is None else operand.contiguous() for operand in (bias, probs))
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_probs = None if probs is None else torch.empty_like(probs)
    if len(rows):
        num_rows, columns = _tile(width, BACKWARD_TILE)
        streams.declare("swiglu backward", (grads, rows, bias, probs), (grad_x, grad_probs))
        shape = (len(rows), width, rows.stride(0), grads.stride(0), num_rows, columns)
        _backward_kernel[(-(-len(rows) // num_rows),)](
            grads, rows, bias, probs, grad_x, grad_probs, *shape, is_interpreted(), num_warps=BACKWARD_WARPS
        )
    return grad_x, grad_probs


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """View x [..., w] as [R, w] with neighbours side by side; a copy only where strides do not allow it."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _tile(width: int, size: int) -> tuple[int, int]:
    """Rows and columns of a tile of `size` elements, both powers of two."""
    columns = 256 if width < WIDE else 1024
    return max(1, size // columns), columns


@triton_jit
def swiglu(gate, up):
    """silu(gate) * up in fp32: [...], [...] -> [...]."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton_jit
def swiglu_gradients(gate, up, grad):
    """Gradients of gate and up for that of silu(gate) * up, and silu(gate), all fp32 [...]."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    activated = gate * sigmoid
    return grad * up * (sigmoid + activated * (1.0 - sigmoid)), grad * activated, activated


@triton_jit
def _load_gate_up(
    x,
    bias,
    row,
    column,
    mask,
    width,
    stride,
):
    """Gate and up of a tile in fp32, bias added."""
    place = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        gate += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + width + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    return gate, up


@triton_jit
def _forward_kernel(
    x,
    bias,
    probs,
    out,
    num_rows,
    width,
    stride,
    rows: tl.constexpr,
    columns: tl.constexpr,
    interpreted: tl.constexpr,
):
    """One tile of y [R, f] from x [R, 2f], bias [2f], probs [R]; neighbouring programs share rows."""
    num_parts = (width + columns - 1) // columns
    row = (tl.program_id(0) // num_parts) * rows + tl.arange(0, rows)
    column = (tl.program_id(0) % num_parts) * columns + tl.arange(0, columns)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    gate, up = _load_gate_up(x, bias, row, column, mask, width, stride)
    y = swiglu(gate, up)
    if probs is not None:
        y *= tl.load(probs + row, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
    place = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(place, narrow(y, out.dtype.element_ty, interpreted), mask=mask)


@triton_jit
def _backward_kernel(
    grad,
    x,
    bias,
    probs,
    grad_x,
    grad_probs,
    num_rows,
    width,
    stride,
    grad_stride,
    rows: tl.constexpr,
    columns: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Whole rows of d x [R, 2f] and d probs [R] from dy [R, f] and x [R, 2f], one tile after the other."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    is_row = row < num_rows
    lanes = tl.zeros([rows, columns], dtype=tl.float32)
    if probs is not None:
        weight = tl.load(probs + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        mask = is_row[:, None] & (column < width)[None, :]
        gate, up = _load_gate_up(x, bias, row, column, mask, width, stride)
        place = grad + row.to(tl.int64)[:, None] * grad_stride + column[None, :]
        dy = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        weighted = dy
        if probs is not None:
            weighted = dy * weight
        grad_gate, grad_up, activated = swiglu_gradients(gate, up, weighted)
        if probs is not None:
            lanes += dy * activated * up
        place = grad_x + row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
        tl.store(place, narrow(grad_gate, grad_x.dtype.element_ty, interpreted), mask=mask)
        tl.store(place + width, narrow(grad_up, grad_x.dtype.element_ty, interpreted), mask=mask)
    if probs is not None:
        total = tl.sum(lanes, axis=1)
        tl.store(grad_probs + row, narrow(total, grad_probs.dtype.element_ty, interpreted), mask=is_row)
