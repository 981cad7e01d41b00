"""Copy tokens into the rows of their experts, and add the rows of each token up again, along a `RowLayout`.

    gather   rows[r]   = tokens[pairs[r] // K], zeros in padding; rows behind the last expert's are not written
             with      row_probs[r] = probs[t, k] of the pair
    sum      tokens[t] = rows[slots[t, 0]] + rows[slots[t, 1]] + ...   in fp32 at least, left to right, rounded once
             with      probs[t, k] = row_probs[slots[t, k]], zero in empty slots

Each is the other's gradient. Both forms, plain and kernel, add in the same order: equal bit for bit.

The kernels are limited by memory: a program handles a part of one row. Along the slots of a layout a token is read once
and stored to each of its rows, which is faster than reading it again for every row. Offsets are 64 bits wide. Any row
stride is read as it is.

Legend: C tokens, K slots of a token, h width, P rows.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.fused_row_layout import TAIL, RowLayout, uses_kernels
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit
from megatron.core.utils.upcast import wide_dtype


@dataclass(frozen=True)
class Tile:
    """What one program of a kernel handles."""

    columns: int
    """Elements of a row, at most."""

    num_warps: int = 4
    """Of 32 threads each."""


GATHER, SPREAD, SUM = Tile(1024, num_warps=2), Tile(4096), Tile(1024)
"""The fastest of those tried on an H200."""


def permute_rows(
    tokens: torch.Tensor, probs: torch.Tensor | None, layout: RowLayout
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gather with gradients: tokens [C, h], probs [C, K] or None -> rows [P, h], row probs [P] or None."""
    return _Permute.apply(tokens, probs, layout)


def unpermute_rows(rows: torch.Tensor, layout: RowLayout, dtype: torch.dtype) -> torch.Tensor:
    """Sum with gradients: rows [P, h] -> tokens [C, h] in `dtype`."""
    return _Unpermute.apply(rows, layout, dtype)


def gather_rows(
    tokens: torch.Tensor, probs: torch.Tensor | None, pairs: torch.Tensor, num_slots: int, *, has_tail: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens [C, h], probs [C, K] or None, pairs int [P] -> rows [P, h], row probs [P]; dtypes unchanged."""
    if uses_kernels(tokens):
        return kernel_gather(tokens, probs, pairs, num_slots)
    is_tail = pairs == TAIL if has_tail else None
    rows = _picked(tokens, pairs.div(num_slots, rounding_mode="floor"), is_tail)
    return rows, None if probs is None else _picked(probs.reshape(-1), pairs, is_tail)


def _picked(source: torch.Tensor, ids: torch.Tensor, is_tail: torch.Tensor | None) -> torch.Tensor:
    """Entries of [m, ...] by id [P]; zero for a negative id, whatever memory holds where `is_tail` [P]."""
    shape = (-1, *[1] * (source.dim() - 1))
    if not source.shape[0]:
        picked = source.new_zeros(len(ids), *source.shape[1:])
    else:
        picked = source.index_select(0, ids.clamp(min=0)).masked_fill((ids < 0).view(shape), 0)
    return picked if is_tail is None else torch.where(is_tail.view(shape), torch.empty_like(picked), picked)


def sum_rows(
    rows: torch.Tensor, row_probs: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [P, h], row probs [P] or None, slots int32 [C, K] -> tokens [C, h] in `dtype`, probs [C, K] or None."""
    if uses_kernels(rows):
        return kernel_sum(rows, row_probs, slots, dtype)
    wide = torch.promote_types(wide_dtype(rows.dtype), dtype)
    total = rows.new_zeros(slots.shape[0], rows.shape[1], dtype=wide)
    if not rows.shape[0]:
        return total.to(dtype), None if row_probs is None else row_probs.new_zeros(slots.shape)
    for slot in slots.unbind(1):
        total += rows.index_select(0, slot.clamp(min=0)).masked_fill(slot.unsqueeze(1) < 0, 0)
    if row_probs is None:
        return total.to(dtype), None
    probs = row_probs[slots.clamp(min=0).long()].masked_fill(slots < 0, 0)
    return total.to(dtype), probs


def spread_rows(
    tokens: torch.Tensor, probs: torch.Tensor | None, layout: RowLayout
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`gather_rows` along a layout: tokens [C, h], probs [C, K] or None -> rows [P, h], row probs [P] or None."""
    if uses_kernels(tokens):
        return kernel_spread(tokens, probs, layout)
    return gather_rows(tokens, probs, layout.pairs, layout.slots_per_token, has_tail=layout.has_tail)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, probs: torch.Tensor | None, layout: RowLayout
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(layout.slots)
        ctx.dtype = tokens.dtype
        ctx.set_materialize_grads(False)
        return spread_rows(tokens, probs, layout)

    @staticmethod
    def backward(
        ctx: Any, grad_rows: torch.Tensor | None, grad_row_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        if grad_rows is None:
            if grad_row_probs is None:
                return None, None, None
            nothing = grad_row_probs.new_empty(len(grad_row_probs), 0)
            return None, sum_rows(nothing, grad_row_probs, slots, ctx.dtype)[1], None
        grad_tokens, grad_probs = sum_rows(grad_rows, grad_row_probs, slots, ctx.dtype)
        return grad_tokens, grad_probs, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layout: RowLayout, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(layout.slots, layout.pairs, layout.tokens_per_expert, layout.dropped_rows)
        ctx.has_tail, ctx.has_padding, ctx.dtype = layout.has_tail, layout.has_padding, rows.dtype
        return sum_rows(rows, None, layout.slots, dtype)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slots, pairs, counts, dropped = ctx.saved_tensors
        layout = RowLayout(slots, pairs, counts, dropped, ctx.has_tail, ctx.has_padding)
        rows, _ = spread_rows(grad.to(ctx.dtype), None, layout)
        return rows, None, None


def kernel_gather(
    tokens: torch.Tensor, probs: torch.Tensor | None, pairs: torch.Tensor, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernel behind `gather_rows`: tokens [C, h], probs [C, K] or None, pairs int [P] -> [P, h], [P] or None."""
    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    probs = None if probs is None else probs.contiguous()
    num_rows, width = len(pairs), tokens.shape[1]
    rows = tokens.new_empty(num_rows, width)
    row_probs = None if probs is None else probs.new_empty(num_rows)
    if num_rows:
        columns, num_parts = _parts(width, GATHER.columns)
        shape = (width, tokens.stride(0), num_slots)
        streams.declare("gather rows", (tokens, probs, pairs), (rows, row_probs))
        grid = (num_rows, num_parts)
        _gather_kernel[grid](tokens, probs, pairs, rows, row_probs, *shape, columns, num_warps=GATHER.num_warps)
    return rows, row_probs


def kernel_spread(
    tokens: torch.Tensor, probs: torch.Tensor | None, layout: RowLayout, tile: Tile = SPREAD
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernel behind `spread_rows`: tokens [C, h], probs [C, K] or None -> [P, h], [P] or None."""
    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    probs = None if probs is None else probs.contiguous()
    (num_tokens, num_slots), (num_rows,), width = layout.slots.shape, layout.pairs.shape, tokens.shape[1]
    rows = tokens.new_empty(num_rows, width)
    row_probs = None if probs is None else probs.new_empty(num_rows)
    columns, num_parts = _parts(width, tile.columns)
    if layout.has_padding and num_rows:
        streams.declare("clear padding", (layout.pairs,), (rows, row_probs))
        _clear_kernel[(num_rows, num_parts)](layout.pairs, rows, row_probs, width, columns)
    if num_tokens:
        shape = (width, tokens.stride(0), num_slots, columns)
        streams.declare("spread rows", (tokens, probs, layout.slots), (rows, row_probs))
        grid = (num_tokens, num_parts)
        _spread_kernel[grid](tokens, probs, layout.slots, rows, row_probs, *shape, num_warps=tile.num_warps)
    return rows, row_probs


def kernel_sum(
    rows: torch.Tensor, row_probs: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype, tile: Tile = SUM
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernel behind `sum_rows`: rows [P, h], row probs [P] or None, slots [C, K] -> [C, h], [C, K] or None."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    row_probs = None if row_probs is None else row_probs.contiguous()
    (num_tokens, num_slots), width = slots.shape, rows.shape[1]
    tokens = rows.new_empty(num_tokens, width, dtype=dtype)
    probs = None if row_probs is None else row_probs.new_empty(num_tokens, num_slots)
    if num_tokens:
        columns, num_parts = _parts(width, tile.columns)
        modes = {"is_double": torch.float64 in (rows.dtype, dtype), "interpreted": is_interpreted()}
        modes |= {"columns": columns, "num_warps": tile.num_warps}
        shape = (width, rows.stride(0), num_slots)
        streams.declare("sum rows", (rows, row_probs, slots), (tokens, probs))
        _sum_kernel[(num_tokens, num_parts)](rows, row_probs, slots, tokens, probs, *shape, **modes)
    return tokens, probs


def _parts(width: int, largest: int) -> tuple[int, int]:
    """Elements of a program's part of a row, a power of two, and parts of a row; one part of a row without elements."""
    columns = min(largest, max(16, 1 << (width - 1).bit_length())) if width else 16
    return columns, max(1, -(-width // columns))


@triton_jit
def _gather_kernel(
    tokens,
    probs,
    pairs,
    rows,
    row_probs,
    width,
    stride,
    num_slots: tl.constexpr,
    columns: tl.constexpr,
):
    """A part of one row [P, h] from tokens [C, h]; the first part also copies probs [C, K] -> [P]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    pair = tl.load(pairs + row)
    is_read, is_written = pair >= 0, pair > -2  # rows behind the last expert's are left alone
    if probs is not None:
        is_first = tl.program_id(1) == 0
        prob = tl.load(probs + pair, mask=is_read & is_first, other=0.0)
        tl.store(row_probs + row, prob, mask=is_written & is_first)
    token = (tl.maximum(pair, 0) // num_slots).to(tl.int64)
    values = tl.load(tokens + token * stride + column, mask=is_read & (column < width), other=0.0)
    tl.store(rows + row * width + column, values, mask=is_written & (column < width))


@triton_jit
def _spread_kernel(
    tokens,
    probs,
    slots,
    rows,
    row_probs,
    width,
    stride,
    num_slots: tl.constexpr,
    columns: tl.constexpr,
):
    """A part of one token [C, h] to all its rows [P, h]; the first part also copies probs [C, K] -> [P]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    values = tl.load(tokens + token * stride + column, mask=column < width, other=0.0)
    for slot in tl.static_range(num_slots):
        row = tl.load(slots + token * num_slots + slot).to(tl.int64)
        tl.store(rows + row * width + column, values, mask=(row >= 0) & (column < width))
        if probs is not None:
            is_first = tl.program_id(1) == 0
            prob = tl.load(probs + token * num_slots + slot, mask=is_first, other=0.0)
            tl.store(row_probs + row, prob, mask=(row >= 0) & is_first)


@triton_jit
def _clear_kernel(
    pairs,
    rows,
    row_probs,
    width,
    columns: tl.constexpr,
):
    """Zeros in a part of one row [P, h], and in its probability [P], if the row is padding."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pairs + row) == -1:
        column = tl.program_id(1) * columns + tl.arange(0, columns)
        tl.store(rows + row * width + column, tl.zeros([columns], rows.dtype.element_ty), mask=column < width)
        if row_probs is not None:
            tl.store(row_probs + row, 0.0)


@triton_jit
def _sum_kernel(
    rows,
    row_probs,
    slots,
    tokens,
    probs,
    width,
    stride,
    num_slots: tl.constexpr,
    is_double: tl.constexpr,
    interpreted: tl.constexpr,
    columns: tl.constexpr,
):
    """A part of one token [C, h] from its rows [P, h]; the first part also copies row probs [P] -> [C, K]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    total = tl.zeros([columns], dtype=tl.float64 if is_double else tl.float32)
    for slot in range(num_slots):
        place = token * num_slots + slot
        row = tl.load(slots + place).to(tl.int64)
        is_read = (row >= 0) & (column < width)
        values = tl.load(rows + row * stride + column, mask=is_read, other=0.0)
        total += values.to(total.dtype)
        if probs is not None:
            is_first = tl.program_id(1) == 0
            prob = tl.load(row_probs + row, mask=(row >= 0) & is_first, other=0.0)
            tl.store(probs + place, prob, mask=is_first)
    narrowed = narrow(total, tokens.dtype.element_ty, interpreted)
    tl.store(tokens + token * width + column, narrowed, mask=column < width)
