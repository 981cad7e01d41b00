"""From the QKV product to the heads of attention: split, norm of each head, rotary embedding, in one kernel each way.

    mixed [s, b, g, r + 2, c]  ->  query [s, b, g * r, c]   x -> turn(x / sqrt(mean(x^2) + eps) * w)
                                   key   [s, b, g, c]       the same with weights of its own
                                   value [s, b, g, c]       a view of mixed

Without weights there is no norm. Statistics, norm and turn are fp32 and rounded once at the end, where the plain form
rounds after the norm and after each step of the turn. Queries and keys come out contiguous, which makes attention give
its result as [s, b, n * c] without a copy.

Backward reads mixed and the three gradients, with any strides, and writes all of d mixed [s, b, g, r + 2, c]:

    u = turn back(dy),  n = x / sqrt(mean(x^2) + eps)      d x = (u * w - n * mean(u * w * n)) / sqrt(...)
                                                           d w = sum over heads of u * n

Each program adds up its heads in order; the sums of all programs are added by one reduction whose order is fixed, so
that a run repeats bit for bit.

Legend: s sequence, b batch, g groups, r query heads of a group, c channels of a head, d turned channels; H heads of a
tile. A slot is one of the s * b * g * (r + 2) heads of mixed.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.fused_rope import (
    PairSizes,
    RotaryTables,
    has_rotary_kernel,
    load_pairs,
    store_pairs,
    turn,
)
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

FORWARD_TILE, BACKWARD_TILE = 2048, 2048
"""Channels that one program of each kernel holds at a time, those of several heads."""

FORWARD_WARPS, BACKWARD_WARPS = 4, 4

PROGRAMS, STAGES = 4096, 1
"""Programs of the backward kernel at most, each with sums of its own of the weights' gradients, and the tiles of which
a program loads one before it is done with the other."""


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of single heads, weights [c] in the dtype of the heads."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    zero_centered: bool
    """Weights are stored minus one."""


def has_heads_kernel(mixed: torch.Tensor, norms: HeadNorms | None, tables: RotaryTables) -> bool:
    """True if kernels split mixed [s, b, g, r + 2, c]: where they turn, with weights of its dtype."""
    weights = () if norms is None else (norms.query_weight, norms.key_weight)
    return has_rotary_kernel(mixed, tables) and all(weight.dtype == mixed.dtype for weight in weights)


def fused_heads(
    mixed: torch.Tensor, norms: HeadNorms | None, tables: RotaryTables, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value by the kernels, with gradients of mixed and of the norms' weights.

    Shapes: mixed [s, b, g, r + 2, c] -> [s, b, g * r, c], [s, b, g, c], [s, b, g, c].
    Graph:  capturable.
    Memory: keeps mixed, which value is a view of, and the tables.
    """
    if norms is None:
        return _FusedHeads.apply(mixed, None, None, tables.cos, tables.sin, (interleaved, 0.0, False))
    settings = (interleaved, norms.eps, norms.zero_centered)
    return _FusedHeads.apply(mixed, norms.query_weight, norms.key_weight, tables.cos, tables.sin, settings)


class _FusedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        query_weight: torch.Tensor | None,
        key_weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        settings: tuple[bool, float, bool],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(mixed, query_weight, key_weight, cos, sin)
        ctx.settings = settings
        interleaved, norms = settings[0], _norms(query_weight, key_weight, settings)
        query, key = kernel_heads(mixed, norms, RotaryTables(cos, sin), interleaved)
        return query, key, mixed.select(3, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mixed, query_weight, key_weight, cos, sin = ctx.saved_tensors
        norms = _norms(query_weight, key_weight, ctx.settings)
        tables, interleaved = RotaryTables(cos, sin), ctx.settings[0]
        grad_mixed, grad_weights = kernel_heads_backward(grads, mixed, norms, tables, interleaved)
        return grad_mixed, *grad_weights, None, None, None


def _norms(
    query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, settings: tuple[bool, float, bool]
) -> HeadNorms | None:
    """Put the norms together again: weights [c] or None."""
    if query_weight is None or key_weight is None:
        return None
    return HeadNorms(query_weight, key_weight, settings[1], settings[2])


def kernel_heads(
    mixed: torch.Tensor, norms: HeadNorms | None, tables: RotaryTables, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward kernel: mixed [s, b, g, r + 2, c] -> query [s, b, g * r, c], key [s, b, g, c]."""
    launch = _Launch(mixed, norms, tables, interleaved, FORWARD_TILE)
    sequence, batch, groups, slots, channels = mixed.shape
    query = mixed.new_empty(sequence, batch, groups * (slots - 2), channels)
    key = mixed.new_empty(sequence, batch, groups, channels)
    if mixed.numel():
        streams.declare("heads", launch.operands, (query, key))
        _heads_kernel[(launch.num_tiles,)](
            *launch.operands, query, key, *launch.numbers, **launch.constants, num_warps=FORWARD_WARPS
        )
    return query, key


def kernel_heads_backward(
    grads: tuple[torch.Tensor, ...],
    mixed: torch.Tensor,
    norms: HeadNorms | None,
    tables: RotaryTables,
    interleaved: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The backward kernel.

    Shapes: gradients of query [s, b, g * r, c], key and value [s, b, g, c], mixed as in forward
        -> d mixed [s, b, g, r + 2, c], gradients of both weights [c] or None.
    """
    launch = _Launch(mixed, norms, tables, interleaved, BACKWARD_TILE)
    grads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
    grad_mixed = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    num_programs = min(PROGRAMS, launch.num_tiles)
    sums = None if norms is None else mixed.new_empty(num_programs, 2, mixed.shape[-1], dtype=torch.float32)
    if mixed.numel():
        strides = [stride for grad in grads for stride in grad.stride()[:3]]
        streams.declare("heads backward", (*grads, *launch.operands), (grad_mixed, sums))
        _heads_backward_kernel[(num_programs,)](
            *grads,
            *launch.operands,
            grad_mixed,
            sums,
            *strides,
            *launch.numbers,
            -(-launch.num_tiles // num_programs),
            **launch.constants,
            stages=STAGES,
            num_warps=BACKWARD_WARPS,
        )
    if norms is None or sums is None:
        return grad_mixed, (None, None)
    query_sum, key_sum = sums.sum(dim=0).to(mixed.dtype).unbind(0)
    return grad_mixed, (query_sum, key_sum)


class _Launch:
    """What both kernels are given.

    Args:
        mixed: [s, b, g, r + 2, c].
        tile: Channels of a tile.
    """

    def __init__(
        self, mixed: torch.Tensor, norms: HeadNorms | None, tables: RotaryTables, interleaved: bool, tile: int
    ) -> None:
        turned = tables.cos.shape[-1]
        sizes = PairSizes(turned // 2, mixed.shape[-1] - turned, tile)
        num_slots = mixed.numel() // max(1, mixed.shape[-1])
        weights = (None, None) if norms is None else (norms.query_weight.contiguous(), norms.key_weight.contiguous())
        self.operands = (mixed.contiguous(), *weights, tables.cos.contiguous(), tables.sin.contiguous())
        self.num_tiles = -(-num_slots // sizes.heads)
        self.numbers = (num_slots, mixed.shape[1], 0.0 if norms is None else norms.eps)
        self.constants: dict[str, Any] = {
            **sizes.arguments(),
            "groups": mixed.shape[2],
            "slots": mixed.shape[3],
            "zero_centered": norms is not None and norms.zero_centered,
            "interleaved": interleaved,
            "interpreted": is_interpreted(),
        }


@triton_jit
def _load_rest(
    place,
    mask,
    num_pairs,
    num_rest,
    rest: tl.constexpr,
):
    """The channels behind the pairs in fp32 [H, rest], from the first channels of heads, place [H]."""
    channel = tl.arange(0, rest)
    inside = mask[:, None] & (channel < num_rest)[None, :]
    return tl.load(place[:, None] + (2 * num_pairs + channel)[None, :], mask=inside, other=0.0).to(tl.float32)


@triton_jit
def _store_rest(
    place,
    values,
    mask,
    num_pairs,
    num_rest,
    rest: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Round the channels behind the pairs, fp32 [H, rest], and store them to heads, place [H]."""
    channel = tl.arange(0, rest)
    inside = mask[:, None] & (channel < num_rest)[None, :]
    target = place[:, None] + (2 * num_pairs + channel)[None, :]
    tl.store(target, narrow(values, place.dtype.element_ty, interpreted), mask=inside)


@triton_jit
def _load_weights(
    weight,
    num_pairs,
    num_rest,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    interleaved: tl.constexpr,
    zero_centered: tl.constexpr,
):
    """A norm's weight [c] in fp32: of the pairs [1, pairs] twice, of the rest [1, rest] or one number of no use."""
    place = weight + tl.arange(0, 1)
    mask = tl.arange(0, 1) < 1
    first, second = load_pairs(place, mask, num_pairs, pairs, interleaved)
    if rest > 0:
        passed = _load_rest(place, mask, num_pairs, num_rest, rest)
    else:
        passed = tl.zeros([1, 1], dtype=tl.float32)
    if zero_centered:
        first, second, passed = first + 1.0, second + 1.0, passed + 1.0
    return first, second, passed


@triton_jit
def _inverse_root(
    first,
    second,
    passed,
    eps,
    num_channels,
    rest: tl.constexpr,
):
    """1 / sqrt(mean of the squares + eps) of each head, [H, 1], from its pairs [H, pairs] and its rest [H, rest]."""
    squares = tl.sum(first * first + second * second, axis=1)
    if rest > 0:
        squares += tl.sum(passed * passed, axis=1)
    return tl.rsqrt(squares / num_channels + eps)[:, None]


@triton_jit
def _heads_kernel(
    mixed,
    query_weight,
    key_weight,
    cos,
    sin,
    query,
    key,
    num_slots,
    num_batch,
    eps,
    num_pairs,
    num_rest,
    groups: tl.constexpr,
    slots: tl.constexpr,
    heads: tl.constexpr,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    zero_centered: tl.constexpr,
    interleaved: tl.constexpr,
    interpreted: tl.constexpr,
):
    """A tile of slots of mixed [s, b, g, r + 2, c] -> query [s, b, g * r, c], key [s, b, g, c]; value is left out."""
    head = tl.program_id(0) * heads + tl.arange(0, heads)
    slot, group = head % slots, head // slots  # group counts through all tokens
    position = head // (slots * groups * num_batch)
    mask = (head < num_slots) & (slot < slots - 1)
    is_key = slot == slots - 2
    num_channels = 2 * num_pairs + num_rest
    source = mixed + head.to(tl.int64) * num_channels
    target = tl.where(
        is_key,
        key + group.to(tl.int64) * num_channels,
        query + (group.to(tl.int64) * (slots - 2) + slot) * num_channels,
    )
    first, second = load_pairs(source, mask, num_pairs, pairs, interleaved)
    if rest > 0:
        passed = _load_rest(source, mask, num_pairs, num_rest, rest)
    else:
        passed = first
    if query_weight is not None:
        sizes_q = _load_weights(query_weight, num_pairs, num_rest, pairs, rest, interleaved, zero_centered)
        sizes_k = _load_weights(key_weight, num_pairs, num_rest, pairs, rest, interleaved, zero_centered)
        inverse = _inverse_root(first, second, passed, eps, num_channels, rest)
        first *= inverse * tl.where(is_key[:, None], sizes_k[0], sizes_q[0])
        second *= inverse * tl.where(is_key[:, None], sizes_k[1], sizes_q[1])
        if rest > 0:
            passed *= inverse * tl.where(is_key[:, None], sizes_k[2], sizes_q[2])
    first, second = turn(first, second, cos, sin, position, mask, num_pairs, pairs, interleaved, False)
    store_pairs(target, first, second, mask, num_pairs, pairs, interleaved, interpreted)
    if rest > 0:
        _store_rest(target, passed, mask, num_pairs, num_rest, rest, interpreted)


@triton_jit
def _heads_backward_kernel(
    grad_query,
    grad_key,
    grad_value,
    mixed,
    query_weight,
    key_weight,
    cos,
    sin,
    grad_mixed,
    sums,
    query_position_stride,
    query_batch_stride,
    query_head_stride,
    key_position_stride,
    key_batch_stride,
    key_head_stride,
    value_position_stride,
    value_batch_stride,
    value_head_stride,
    num_slots,
    num_batch,
    eps,
    num_tiles,
    num_pairs,
    num_rest,
    groups: tl.constexpr,
    slots: tl.constexpr,
    heads: tl.constexpr,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    zero_centered: tl.constexpr,
    interleaved: tl.constexpr,
    interpreted: tl.constexpr,
    stages: tl.constexpr,
):
    """`num_tiles` tiles of d mixed [s, b, g, r + 2, c], one after the other; sums [programs, 2, c] of d w."""
    num_channels = 2 * num_pairs + num_rest
    if query_weight is not None:
        of_query = _load_weights(query_weight, num_pairs, num_rest, pairs, rest, interleaved, zero_centered)
        of_key = _load_weights(key_weight, num_pairs, num_rest, pairs, rest, interleaved, zero_centered)
        query_first = tl.zeros([heads, pairs], dtype=tl.float32)
        query_second, key_first, key_second = query_first, query_first, query_first
        if rest > 0:
            query_passed = tl.zeros([heads, rest], dtype=tl.float32)
            key_passed = query_passed
    for tile in tl.range(0, num_tiles, num_stages=stages):
        head = (tl.program_id(0) * num_tiles + tile) * heads + tl.arange(0, heads)
        slot, group = head % slots, head // slots
        token = group // groups
        position, batch = (token // num_batch).to(tl.int64), (token % num_batch).to(tl.int64)
        group = (group % groups).to(tl.int64)
        mask = head < num_slots
        is_query, is_key = (slot < slots - 2)[:, None], (slot == slots - 2)[:, None]
        is_value = (slot == slots - 1)[:, None]
        at_query = position * query_position_stride + batch * query_batch_stride
        at_key = position * key_position_stride + batch * key_batch_stride + group * key_head_stride
        at_value = position * value_position_stride + batch * value_batch_stride + group * value_head_stride
        source = tl.where(
            slot < slots - 2,
            grad_query + at_query + (group * (slots - 2) + slot) * query_head_stride,
            tl.where(slot == slots - 2, grad_key + at_key, grad_value + at_value),
        )
        target = grad_mixed + head.to(tl.int64) * num_channels
        raw_first, raw_second = load_pairs(source, mask, num_pairs, pairs, interleaved)
        first, second = turn(raw_first, raw_second, cos, sin, position, mask, num_pairs, pairs, interleaved, True)
        if rest > 0:
            raw_passed = _load_rest(source, mask, num_pairs, num_rest, rest)
            passed = raw_passed
        if query_weight is not None:
            is_normed = mask & (slot < slots - 1)
            place = mixed + head.to(tl.int64) * num_channels
            x_first, x_second = load_pairs(place, is_normed, num_pairs, pairs, interleaved)
            if rest > 0:
                x_passed = _load_rest(place, is_normed, num_pairs, num_rest, rest)
            else:
                x_passed = x_first
            inverse = _inverse_root(x_first, x_second, x_passed, eps, num_channels, rest)
            inverse = tl.where(is_normed[:, None], inverse, 0.0)
            x_first *= inverse
            x_second *= inverse
            query_first += tl.where(is_query, first * x_first, 0.0)
            query_second += tl.where(is_query, second * x_second, 0.0)
            key_first += tl.where(is_key, first * x_first, 0.0)
            key_second += tl.where(is_key, second * x_second, 0.0)
            first *= tl.where(is_key, of_key[0], of_query[0])
            second *= tl.where(is_key, of_key[1], of_query[1])
            along = tl.sum(first * x_first + second * x_second, axis=1)
            if rest > 0:
                x_passed *= inverse
                query_passed += tl.where(is_query, passed * x_passed, 0.0)
                key_passed += tl.where(is_key, passed * x_passed, 0.0)
                passed *= tl.where(is_key, of_key[2], of_query[2])
                along += tl.sum(passed * x_passed, axis=1)
                passed = (passed - x_passed * (along / num_channels)[:, None]) * inverse
            first = (first - x_first * (along / num_channels)[:, None]) * inverse
            second = (second - x_second * (along / num_channels)[:, None]) * inverse
        first, second = tl.where(is_value, raw_first, first), tl.where(is_value, raw_second, second)
        store_pairs(target, first, second, mask, num_pairs, pairs, interleaved, interpreted)
        if rest > 0:
            passed = tl.where(is_value, raw_passed, passed)
            _store_rest(target, passed, mask, num_pairs, num_rest, rest, interpreted)
    if query_weight is not None:
        one, always = tl.arange(0, 1), tl.arange(0, 1) < 1
        at_query = sums + (2 * tl.program_id(0) + one) * num_channels
        at_key = at_query + num_channels
        query_first, query_second = tl.sum(query_first, axis=0)[None, :], tl.sum(query_second, axis=0)[None, :]
        key_first, key_second = tl.sum(key_first, axis=0)[None, :], tl.sum(key_second, axis=0)[None, :]
        store_pairs(at_query, query_first, query_second, always, num_pairs, pairs, interleaved, interpreted)
        store_pairs(at_key, key_first, key_second, always, num_pairs, pairs, interleaved, interpreted)
        if rest > 0:
            query_passed, key_passed = tl.sum(query_passed, axis=0)[None, :], tl.sum(key_passed, axis=0)[None, :]
            _store_rest(at_query, query_passed, always, num_pairs, num_rest, rest, interpreted)
            _store_rest(at_key, key_passed, always, num_pairs, num_rest, rest, interpreted)
