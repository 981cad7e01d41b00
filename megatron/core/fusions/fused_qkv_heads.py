"""From the QKV product to the heads of attention: split, norm of each head, rotary embedding, in one kernel each way.

    mixed [s, b, g, r + 2, c]  ->  query [s, b, g * r, c]   x -> turn(x / sqrt(mean(x^2) + eps) * w)
                                   key   [s, b, g, c]       the same with weights of its own
                                   value [s, b, g, c]       a view of mixed

Without weights there is no norm. Statistics, norm and turn are fp32 and rounded once at the end, where the plain form
rounds after the norm and after each step of the turn. Queries and keys come out contiguous, which makes attention by
cuDNN give its result as [s, b, n * c] without a copy; flash attention copies two tensors of the queries' size.

Backward reads mixed and the three gradients, with any strides, and writes all of d mixed [s, b, g, r + 2, c]:

    u = turn back(dy),  n = x / sqrt(mean(x^2) + eps)      d x = (u * w - n * mean(u * w * n)) / sqrt(...)
                                                           d w = sum over heads of u * n

Each program adds up its heads in order; the sums of all programs are added by one reduction whose order is fixed, so
that a run repeats bit for bit. A tile holds queries or keys, never both: it needs one weight, and one sum.

Legend: s sequence, b batch, g groups, r query heads of a group, c channels of a head, d turned channels; H heads of a
tile. A slot is one of the r + 2 heads of a group in mixed.
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
from megatron.core.fusions.partial_sums import add_partial_sums
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

FORWARD_TILE, BACKWARD_TILE = 2048, 2048
"""Channels that one program of each kernel holds at a time, those of several heads."""

FORWARD_WARPS, BACKWARD_WARPS = 4, 4

PROGRAMS, STAGES = 2048, 1
"""Programs of the backward kernel at most, as many for queries as for keys, each with a sum of its own of the weight's
gradient; and tiles that a program has in hand at a time."""


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
        numbers = (*launch.numbers, launch.query_tiles)
        _heads_kernel[(launch.query_tiles + launch.key_tiles,)](
            *launch.operands, query, key, *numbers, **launch.constants, num_warps=FORWARD_WARPS
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
    num_programs = min(PROGRAMS, launch.query_tiles)
    sums = None if norms is None else mixed.new_empty(2, num_programs, mixed.shape[-1], dtype=torch.float32)
    if mixed.numel():
        strides = [stride for grad in grads for stride in grad.stride()[:3]]
        shares = [-(-tiles // num_programs) for tiles in (launch.query_tiles, launch.key_tiles)]
        streams.declare("heads backward", (*grads, *launch.operands), (grad_mixed, sums))
        _heads_backward_kernel[(2 * num_programs,)](
            *grads,
            *launch.operands,
            grad_mixed,
            sums,
            *strides,
            *launch.numbers,
            num_programs,
            *shares,
            **launch.constants,
            stages=STAGES,
            num_warps=BACKWARD_WARPS,
        )
    if norms is None or sums is None:
        return grad_mixed, (None, None)
    query_sum, key_sum = add_partial_sums(sums, mixed.dtype).unbind(0)
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
        num_groups = mixed.shape[:3].numel()
        weights = (None, None) if norms is None else (norms.query_weight.contiguous(), norms.key_weight.contiguous())
        self.operands = (mixed.contiguous(), *weights, tables.cos.contiguous(), tables.sin.contiguous())
        self.query_tiles = -(-num_groups * (mixed.shape[3] - 2) // sizes.heads)
        self.key_tiles = -(-num_groups // sizes.heads)
        self.numbers = (num_groups, mixed.shape[1], 0.0 if norms is None else norms.eps)
        self.constants: dict[str, Any] = {
            **sizes.arguments(),
            "groups": mixed.shape[2],
            "slots": mixed.shape[3],
            "zero_centered": norms is not None and norms.zero_centered,
            "interleaved": interleaved,
            "interpreted": is_interpreted(),
        }


@triton_jit
def _load_head(
    place,
    mask,
    num_pairs,
    num_rest,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Heads in fp32, place [H]: pairs [H, pairs] twice and what passes [H, rest]; if nothing does, zeros [H, 1]."""
    first, second = load_pairs(place, mask, num_pairs, pairs, interleaved)
    if rest > 0:
        channel = tl.arange(0, rest)
        inside = mask[:, None] & (channel < num_rest)[None, :]
        target = place[:, None] + (2 * num_pairs + channel)[None, :]
        passed = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    else:
        passed = tl.zeros([place.shape[0], 1], dtype=tl.float32)
    return first, second, passed


@triton_jit
def _store_head(
    place,
    first,
    second,
    passed,
    mask,
    num_pairs,
    num_rest,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    interleaved: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Round heads, fp32 as from `_load_head`, and store them, place [H]."""
    store_pairs(place, first, second, mask, num_pairs, pairs, interleaved, interpreted)
    if rest > 0:
        channel = tl.arange(0, rest)
        inside = mask[:, None] & (channel < num_rest)[None, :]
        target = place[:, None] + (2 * num_pairs + channel)[None, :]
        tl.store(target, narrow(passed, place.dtype.element_ty, interpreted), mask=inside)


@triton_jit
def _load_weight(
    weight,
    num_pairs,
    num_rest,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    interleaved: tl.constexpr,
    zero_centered: tl.constexpr,
):
    """A norm's weight [c] as one head."""
    one = tl.arange(0, 1)
    first, second, passed = _load_head(weight + one, one < 1, num_pairs, num_rest, pairs, rest, interleaved)
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
):
    """1 / sqrt(mean of the squares + eps) of each head, [H, 1]."""
    squares = tl.sum(first * first + second * second, axis=1) + tl.sum(passed * passed, axis=1)
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
    num_groups,
    num_batch,
    eps,
    num_query_tiles,
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
    """A tile of query [s, b, g * r, c] or, behind all of these, of key [s, b, g, c] from mixed [s, b, g, r + 2, c]."""
    is_key = tl.program_id(0) >= num_query_tiles
    tile = tl.program_id(0) - tl.where(is_key, num_query_tiles, 0)
    head = tile * heads + tl.arange(0, heads)
    group = tl.where(is_key, head, head // (slots - 2))  # counted through all tokens
    slot = tl.where(is_key, slots - 2, head % (slots - 2))
    mask = group < num_groups
    num_channels = 2 * num_pairs + num_rest
    source = mixed + (group.to(tl.int64) * slots + slot) * num_channels
    first, second, passed = _load_head(source, mask, num_pairs, num_rest, pairs, rest, interleaved)
    if query_weight is not None:
        weight = tl.where(is_key, key_weight, query_weight)
        w_first, w_second, w_passed = _load_weight(weight, num_pairs, num_rest, pairs, rest, interleaved, zero_centered)
        inverse = _inverse_root(first, second, passed, eps, num_channels)
        first, second, passed = first * inverse * w_first, second * inverse * w_second, passed * inverse * w_passed
    position = group // (groups * num_batch)
    first, second = turn(first, second, cos, sin, position, mask, num_pairs, pairs, interleaved, False)
    target = tl.where(is_key, key, query) + head.to(tl.int64) * num_channels
    _store_head(target, first, second, passed, mask, num_pairs, num_rest, pairs, rest, interleaved, interpreted)


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
    num_groups,
    num_batch,
    eps,
    num_programs,
    num_query_tiles,
    num_key_tiles,
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
    """A share of the queries' tiles of d mixed [s, b, g, r + 2, c], or of the keys' and values', one after the other.

    `num_programs` programs share the queries, as many behind them keys and values; sums [2, programs, c] of d w.
    """
    is_key = tl.program_id(0) >= num_programs
    num_tiles = tl.where(is_key, num_key_tiles, num_query_tiles)
    begin = (tl.program_id(0) - tl.where(is_key, num_programs, 0)) * num_tiles
    grad = tl.where(is_key, grad_key, grad_query)
    position_stride = tl.where(is_key, key_position_stride, query_position_stride)
    batch_stride = tl.where(is_key, key_batch_stride, query_batch_stride)
    head_stride = tl.where(is_key, key_head_stride, query_head_stride)
    num_channels = 2 * num_pairs + num_rest
    if query_weight is not None:
        weight = tl.where(is_key, key_weight, query_weight)
        w_first, w_second, w_passed = _load_weight(weight, num_pairs, num_rest, pairs, rest, interleaved, zero_centered)
        sum_first = tl.zeros([heads, pairs], dtype=tl.float32)
        sum_second = sum_first
        sum_passed = tl.zeros([heads, rest if rest > 0 else 1], dtype=tl.float32)
    for tile in tl.range(0, num_tiles, num_stages=stages):
        head = (begin + tile) * heads + tl.arange(0, heads)
        group = tl.where(is_key, head, head // (slots - 2))
        slot = tl.where(is_key, slots - 2, head % (slots - 2))
        token, mask = group // groups, group < num_groups
        position, batch = token // num_batch, token % num_batch
        of_token = tl.where(is_key, group % groups, (group % groups) * (slots - 2) + slot).to(tl.int64)
        source = grad + position.to(tl.int64) * position_stride + batch.to(tl.int64) * batch_stride
        source += of_token * head_stride
        first, second, passed = _load_head(source, mask, num_pairs, num_rest, pairs, rest, interleaved)
        place = (group.to(tl.int64) * slots + slot) * num_channels
        if query_weight is not None:
            x_first, x_second, x_passed = _load_head(mixed + place, mask, num_pairs, num_rest, pairs, rest, interleaved)
        first, second = turn(first, second, cos, sin, position, mask, num_pairs, pairs, interleaved, True)
        if query_weight is not None:
            inverse = _inverse_root(x_first, x_second, x_passed, eps, num_channels)
            inverse = tl.where(mask[:, None], inverse, 0.0)
            x_first, x_second, x_passed = x_first * inverse, x_second * inverse, x_passed * inverse
            sum_first += first * x_first
            sum_second += second * x_second
            sum_passed += passed * x_passed
            first, second, passed = first * w_first, second * w_second, passed * w_passed
            along = tl.sum(first * x_first + second * x_second, axis=1) + tl.sum(passed * x_passed, axis=1)
            along = (along / num_channels)[:, None]
            first = (first - x_first * along) * inverse
            second = (second - x_second * along) * inverse
            passed = (passed - x_passed * along) * inverse
        _store_head(
            grad_mixed + place, first, second, passed, mask, num_pairs, num_rest, pairs, rest, interleaved, interpreted
        )
    if is_key:
        for tile in tl.range(0, num_tiles, num_stages=stages):
            group = (begin + tile) * heads + tl.arange(0, heads)
            token, mask = group // groups, group < num_groups
            source = grad_value + (token // num_batch).to(tl.int64) * value_position_stride
            source += (token % num_batch).to(tl.int64) * value_batch_stride
            source += (group % groups).to(tl.int64) * value_head_stride
            first, second, passed = _load_head(source, mask, num_pairs, num_rest, pairs, rest, interleaved)
            target = grad_mixed + (group.to(tl.int64) * slots + (slots - 1)) * num_channels
            _store_head(target, first, second, passed, mask, num_pairs, num_rest, pairs, rest, interleaved, interpreted)
    if query_weight is not None:
        one = tl.arange(0, 1)
        first, second = tl.sum(sum_first, axis=0)[None, :], tl.sum(sum_second, axis=0)[None, :]
        passed = tl.sum(sum_passed, axis=0)[None, :]
        target = sums + (tl.program_id(0) + one) * num_channels
        _store_head(target, first, second, passed, one < 1, num_pairs, num_rest, pairs, rest, interleaved, interpreted)
