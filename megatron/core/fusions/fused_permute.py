"""Copy tokens into the rows of their experts, and add the rows of each token up again, along a `RowLayout`.

    gather   rows[r]   = tokens[pairs[r] // K], zeros in padding; rows behind the last expert's are not written
             with      row_probs[r] = probs[t, k] of the pair
    sum      tokens[t] = rows[slots[t, 0]] + rows[slots[t, 1]] + ...   in fp32 at least, left to right, rounded once
             with      probs[t, k] = row_probs[slots[t, k]], zero in empty slots

Each is the other's gradient. Both forms, plain and kernel, add in the same order: equal bit for bit.

The kernels are limited by memory: a program copies about 4 KiB per step, part of a wide row or several narrow ones.
Offsets are 64 bits wide. Any row stride is read as it is.

Legend: C tokens, K slots of a token, h width, P rows.
"""

# ruff: noqa: ANN001 (a compiled kernel takes no annotations but tl.constexpr)
from typing import Any

import torch

from megatron.core.fusions.fused_row_layout import TAIL, RowLayout, uses_kernels
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit
from megatron.core.utils.upcast import wide_dtype

ELEMENTS = 2048
"""Elements of a tile [rows, columns] of one program."""


def permute_rows(
    tokens: torch.Tensor, probs: torch.Tensor | None, layout: RowLayout
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gather with gradients: tokens [C, h], probs [C, K] or None -> rows [P, h], row probs [P] or None."""
    return _Permute.apply(tokens, probs, layout.slots, layout.pairs, layout.has_tail)


def unpermute_rows(rows: torch.Tensor, layout: RowLayout, dtype: torch.dtype) -> torch.Tensor:
    """Sum with gradients: rows [P, h] -> tokens [C, h] in `dtype`."""
    return _Unpermute.apply(rows, layout.slots, layout.pairs, layout.has_tail, dtype)


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


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        probs: torch.Tensor | None,
        slots: torch.Tensor,
        pairs: torch.Tensor,
        has_tail: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(slots)
        ctx.dtype, ctx.width = tokens.dtype, tokens.shape[1]
        ctx.set_materialize_grads(False)
        return gather_rows(tokens, probs, pairs, slots.shape[1], has_tail=has_tail)

    @staticmethod
    def backward(
        ctx: Any, grad_rows: torch.Tensor | None, grad_row_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        if grad_rows is None:
            if grad_row_probs is None:
                return None, None, None, None, None
            nothing = grad_row_probs.new_empty(len(grad_row_probs), 0)
            return None, sum_rows(nothing, grad_row_probs, slots, ctx.dtype)[1], None, None, None
        grad_tokens, grad_probs = sum_rows(grad_rows, grad_row_probs, slots, ctx.dtype)
        return grad_tokens, grad_probs, None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, slots: torch.Tensor, pairs: torch.Tensor, has_tail: bool, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(pairs)
        ctx.num_slots, ctx.has_tail, ctx.dtype = slots.shape[1], has_tail, rows.dtype
        return sum_rows(rows, None, slots, dtype)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (pairs,) = ctx.saved_tensors
        rows, _ = gather_rows(grad.to(ctx.dtype), None, pairs, ctx.num_slots, has_tail=ctx.has_tail)
        return rows, None, None, None, None


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
        block, columns = _tile(width)
        grid = (-(-num_rows // block), max(1, -(-width // columns)))
        shape = (num_rows, width, tokens.stride(0), num_slots)
        _gather_kernel[grid](tokens, probs, pairs, rows, row_probs, *shape, block, columns)
    return rows, row_probs


def kernel_sum(
    rows: torch.Tensor, row_probs: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernel behind `sum_rows`: rows [P, h], row probs [P] or None, slots [C, K] -> [C, h], [C, K] or None."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    row_probs = None if row_probs is None else row_probs.contiguous()
    (num_tokens, num_slots), width = slots.shape, rows.shape[1]
    tokens = rows.new_empty(num_tokens, width, dtype=dtype)
    probs = None if row_probs is None else row_probs.new_empty(num_tokens, num_slots)
    if num_tokens:
        block, columns = _tile(width)
        modes = {"is_double": torch.float64 in (rows.dtype, dtype), "interpreted": is_interpreted()}
        shape = (num_tokens, width, rows.stride(0), num_slots)
        grid = (-(-num_tokens // block), max(1, -(-width // columns)))
        _sum_kernel[grid](rows, row_probs, slots, tokens, probs, *shape, **modes, block=block, columns=columns)
    return tokens, probs


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program's tile, powers of two."""
    columns = min(ELEMENTS, max(16, 1 << (width - 1).bit_length())) if width else 16
    return ELEMENTS // columns if columns < ELEMENTS else 1, columns


@triton_jit
def _gather_kernel(
    tokens,
    probs,
    pairs,
    rows,
    row_probs,
    num_rows,
    width,
    stride,
    num_slots: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """One tile of rows [P, h] from tokens [C, h]; the first column of programs also copies probs [C, K] -> [P]."""
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    pair = tl.load(pairs + row, mask=row < num_rows, other=-2)
    is_read, is_written = pair >= 0, pair > -2  # rows behind the last expert's are left alone
    if probs is not None:
        is_first = tl.program_id(1) == 0
        prob = tl.load(probs + pair, mask=is_read & is_first, other=0.0)
        tl.store(row_probs + row, prob, mask=is_written & is_first)
    token = (tl.maximum(pair, 0) // num_slots).to(tl.int64)
    is_column = (column < width)[None, :]
    values = tl.load(tokens + token[:, None] * stride + column[None, :], mask=is_read[:, None] & is_column, other=0.0)
    tl.store(rows + row[:, None] * width + column[None, :], values, mask=is_written[:, None] & is_column)


@triton_jit
def _sum_kernel(
    rows,
    row_probs,
    slots,
    tokens,
    probs,
    num_tokens,
    width,
    stride,
    num_slots: tl.constexpr,
    is_double: tl.constexpr,
    interpreted: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """One tile of tokens [C, h] from rows [P, h]; the first column of programs also copies row probs [P] -> [C, K]."""
    token = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_token, is_column = token < num_tokens, (column < width)[None, :]
    total = tl.zeros([block, columns], dtype=tl.float64 if is_double else tl.float32)
    for slot in range(num_slots):
        place = token * num_slots + slot
        row = tl.load(slots + place, mask=is_token, other=-1).to(tl.int64)
        has_row = row >= 0
        where = rows + row[:, None] * stride + column[None, :]
        total += tl.load(where, mask=has_row[:, None] & is_column, other=0.0).to(total.dtype)
        if probs is not None:
            is_first = tl.program_id(1) == 0
            prob = tl.load(row_probs + row, mask=has_row & is_first, other=0.0)
            tl.store(probs + place, prob, mask=is_token & is_first)
    where = tokens + token[:, None] * width + column[None, :]
    tl.store(where, narrow(total, tokens.dtype.element_ty, interpreted), mask=is_token[:, None] & is_column)
