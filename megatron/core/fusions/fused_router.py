"""From router logits to a routing in one kernel, and back in one: scores, choice, weights, sums for balancing losses.

    chosen     the k largest of x, or of score + bias; the lowest id among equals
    weights    softmax         softmax of x over the chosen
               pre_softmax     softmax of x over all, where chosen
               sigmoid, sqrtsoftplus     score / sum of the chosen scores if k > 1, else the score
    probs      scaling * weights, zero elsewhere
    sums       for each sample: a = softmax over all, or score / sum of all scores, added over its real tokens; the real
               tokens that chose each expert; and those whose k largest x hold it, whatever the bias says

The gradient needs the logits and the map alone; it joins what comes from the probabilities with what comes from the
sums. All of it is fp32. Programs own blocks of tokens of one sample and leave partial sums, which are added in block
order: the same bits every time. The plain form is `transformer/moe/topk.py` with `load_balance.py`.

Legend: T tokens, B samples (token t belongs to sample t % B), E experts, k experts per token, b blocks.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
# ruff: noqa: RET505 (and it needs both branches of a constant condition)
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.core import streams
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

ScoreKind = Literal["softmax", "pre_softmax", "sigmoid", "sqrtsoftplus"]
TILE = 2048
"""Entries of the table [tokens, experts] that a program holds."""


@dataclass(frozen=True)
class ScoreRule:
    """How logits become weights."""

    topk: int
    """k"""

    kind: ScoreKind
    """What an expert is worth."""

    scaling: float = 1.0
    """Multiplies the weights."""


@dataclass(frozen=True)
class RoutedTokens:
    """What a router knows of its tokens besides their logits."""

    num_samples: int
    """B"""

    bias: torch.Tensor | None = None
    """fp32 [E], added to the scores that are ranked."""

    indices: torch.Tensor | None = None
    """int64 [T, k], a choice that was made before."""

    is_real: torch.Tensor | None = None
    """bool [T], False for padding."""


@dataclass(frozen=True)
class FusedRouting:
    """The routing of all tokens."""

    probs: torch.Tensor
    """[T, E] in the dtype of the logits, with gradient."""

    routing_map: torch.Tensor
    """bool [T, E]"""

    indices: torch.Tensor
    """int64 [T, k], best first."""

    score_sums: torch.Tensor
    """fp32 [B, E] over real tokens, with gradient."""

    counts: torch.Tensor
    """int64 [B, E], real tokens that chose the expert."""

    plain_counts: torch.Tensor
    """int64 [B, E], the same by the logits alone."""


def fused_routing(logits: torch.Tensor, rule: ScoreRule, tokens: RoutedTokens) -> FusedRouting:
    """Route logits [T, E] of fp32, bf16 or fp16.

    Host: no synchronisation. Graph: capturable.
    Memory: keeps the logits and the map for backward.
    """
    return FusedRouting(*_Route.apply(logits, rule, tokens))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, rule: ScoreRule, tokens: RoutedTokens) -> tuple[torch.Tensor, ...]:
        logits = logits.contiguous()
        probs, routing_map, indices, score_sums, counts = route(logits, rule, tokens)
        ctx.save_for_backward(logits, routing_map, tokens.is_real)
        ctx.rule, ctx.num_samples = rule, tokens.num_samples
        own, plain = counts.unbind()
        ctx.mark_non_differentiable(routing_map, indices, own, plain)
        ctx.set_materialize_grads(False)
        return probs, routing_map, indices, score_sums, own, plain

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, routing_map, is_real = ctx.saved_tensors
        grad_probs, grad_sums = grads[0], grads[3]
        if grad_probs is None and grad_sums is None:
            return None, None, None
        tokens = RoutedTokens(ctx.num_samples, is_real=is_real)
        return route_gradient(logits, routing_map, grad_probs, grad_sums, ctx.rule, tokens), None, None


def route(logits: torch.Tensor, rule: ScoreRule, tokens: RoutedTokens) -> tuple[torch.Tensor, ...]:
    """The kernel of the forward pass.

    Shapes: contiguous logits [T, E] -> probs [T, E], map bool [T, E], ids int64 [T, k], score sums fp32 [B, E],
        counts int64 [2, B, E] by choice and by plain logits.
    """
    (num_tokens, num_experts), num_samples = logits.shape, tokens.num_samples
    block, width, num_blocks = _grid(num_tokens, num_experts, num_samples)
    probs = torch.empty_like(logits)
    chosen = torch.empty(logits.shape, dtype=torch.uint8, device=logits.device)
    indices = logits.new_empty(num_tokens, rule.topk, dtype=torch.int64) if tokens.indices is None else tokens.indices
    partial_sums = logits.new_empty(num_blocks, num_samples, num_experts, dtype=torch.float32)
    partial_counts = logits.new_empty(num_blocks, 2, num_samples, num_experts, dtype=torch.int32)
    if num_tokens:
        is_real = None if tokens.is_real is None else tokens.is_real.contiguous()
        written = (probs, chosen, indices, partial_sums, partial_counts)
        streams.declare("route", (logits, tokens.bias, is_real, tokens.indices), written)
        _route_kernel[(num_blocks, num_samples)](
            logits,
            tokens.bias,
            is_real,
            *written,
            num_tokens // num_samples,
            num_experts,
            rule.scaling,
            topk=rule.topk,
            kind=_KINDS[rule.kind],
            is_given=tokens.indices is not None,
            interpreted=is_interpreted(),
            block=block,
            width=width,
        )
    return probs, chosen.view(torch.bool), indices.view_as(indices), partial_sums.sum(0), partial_counts.sum(0)


def route_gradient(
    logits: torch.Tensor,
    routing_map: torch.Tensor,
    grad_probs: torch.Tensor | None,
    grad_sums: torch.Tensor | None,
    rule: ScoreRule,
    tokens: RoutedTokens,
) -> torch.Tensor:
    """The kernel of backward: logits and grad of probs [T, E], map bool [T, E], grad of sums [B, E] -> [T, E]."""
    (num_tokens, num_experts), num_samples = logits.shape, tokens.num_samples
    block, width, num_blocks = _grid(num_tokens, num_experts, num_samples)
    result = torch.empty_like(logits)
    if num_tokens:
        grad_probs = None if grad_probs is None else grad_probs.contiguous()
        grad_sums = None if grad_sums is None else grad_sums.contiguous()
        is_real = None if tokens.is_real is None else tokens.is_real.contiguous()
        read = (logits, routing_map.view(torch.uint8), grad_probs, grad_sums, is_real)
        streams.declare("gradient of a routing", read, (result,))
        _gradient_kernel[(num_blocks, num_samples)](
            *read,
            result,
            num_tokens // num_samples,
            num_experts,
            rule.scaling,
            topk=rule.topk,
            kind=_KINDS[rule.kind],
            interpreted=is_interpreted(),
            block=block,
            width=width,
        )
    return result


_KINDS = {"softmax": 0, "pre_softmax": 1, "sigmoid": 2, "sqrtsoftplus": 3}


def _grid(num_tokens: int, num_experts: int, num_samples: int) -> tuple[int, int, int]:
    """Tokens and columns of a program, powers of two, and blocks of a sample."""
    width = 1 << (num_experts - 1).bit_length()
    block = max(1, min(TILE // width, 64))
    return block, width, -(-(num_tokens // num_samples) // block)


@triton_jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))) of fp32 [...], exp(x / 2) where the softplus underflows."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    log = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(x < -30.0, tl.exp(0.5 * x), tl.sqrt(tl.maximum(x, 0.0) + log))


@triton_jit
def _score(x, kind: tl.constexpr):
    """Scores of logits fp32 [block, width]; columns without an expert hold -inf and get 0."""
    if kind < 2:
        shifted = tl.exp(x - tl.max(x, 1)[:, None])
        return shifted / tl.sum(shifted, 1)[:, None]
    elif kind == 2:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return _sqrt_softplus(x)


@triton_jit
def _ranked(x, is_expert):
    """What is compared: fp32 [block, width] without infinities and NaN, so that no column is chosen twice."""
    key = tl.where(x != x, 3.0e38, tl.minimum(tl.maximum(x, -3.0e38), 3.0e38))
    return tl.where(is_expert, key, -float("inf"))


@triton_jit
def _largest(key, column, topk: tl.constexpr, width: tl.constexpr):
    """True at the `topk` largest keys of each row, [block, width]."""
    chosen = key != key  # nowhere: keys are numbers
    for _ in tl.static_range(topk):
        best = tl.max(key, 1)
        pick = tl.min(tl.where(key == best[:, None], column, width), 1)
        is_pick = column == pick[:, None]
        chosen = chosen | is_pick
        key = tl.where(is_pick, -float("inf"), key)
    return chosen


@triton_jit
def _weights(x, scores, chosen, topk: tl.constexpr, kind: tl.constexpr):
    """Weights of the chosen experts fp32 [block, width], zero elsewhere, without scaling."""
    if kind == 0:
        shifted = tl.where(chosen, tl.exp(x - tl.max(tl.where(chosen, x, -float("inf")), 1)[:, None]), 0.0)
        return shifted / tl.sum(shifted, 1)[:, None]
    else:
        kept = tl.where(chosen, scores, 0.0)
        if kind >= 2 and topk > 1:
            kept = kept / (tl.sum(kept, 1)[:, None] + 1e-20)
        return kept


@triton_jit
def _route_kernel(
    logits,
    bias,
    is_real,
    probs,
    chosen_map,
    indices,
    partial_sums,
    partial_counts,
    num_rows,
    num_experts,
    scaling,
    topk: tl.constexpr,
    kind: tl.constexpr,
    is_given: tl.constexpr,
    interpreted: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    """A block of one sample's tokens: logits [T, E] -> probs and map [T, E], ids [T, k], its partial sums [E]."""
    part, sample, num_samples = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place = part * block + tl.arange(0, block)
    is_row = place < num_rows
    token = (place * num_samples + sample).to(tl.int64)
    column = tl.arange(0, width)[None, :]
    is_expert = column < num_experts
    entry = token[:, None] * num_experts + column
    is_entry = is_row[:, None] & is_expert
    x = tl.load(logits + entry, mask=is_entry, other=0.0).to(tl.float32)
    x = tl.where(is_expert, x, -float("inf"))
    scores = _score(x, kind)
    key = _ranked(x, is_expert)
    ranked = key
    if bias is not None:
        shift = tl.load(bias + column, mask=is_expert, other=0.0)
        ranked = _ranked((x if kind == 0 else scores) + shift, is_expert)
    chosen = is_entry & (column < 0)
    if is_given:
        for slot in tl.static_range(topk):
            pick = tl.load(indices + token * topk + slot, mask=is_row, other=0)
            chosen = chosen | (column == pick[:, None])
    else:
        for slot in tl.static_range(topk):
            best = tl.max(ranked, 1)
            pick = tl.min(tl.where(ranked == best[:, None], column, width), 1)
            tl.store(indices + token * topk + slot, pick.to(tl.int64), mask=is_row)
            is_pick = column == pick[:, None]
            chosen = chosen | is_pick
            ranked = tl.where(is_pick, -float("inf"), ranked)
    weights = _weights(x, scores, chosen, topk, kind) * scaling
    tl.store(probs + entry, narrow(weights, probs.dtype.element_ty, interpreted), mask=is_entry)
    tl.store(chosen_map + entry, chosen.to(tl.uint8), mask=is_entry)

    is_counted = is_row
    if is_real is not None:
        is_counted = is_counted & (tl.load(is_real + token, mask=is_row, other=0) != 0)
    if kind >= 2:
        scores = scores / (tl.sum(scores, 1)[:, None] + 1e-20)
    plain = chosen
    if bias is not None:
        plain = _largest(key, column, topk, width)
    expert = tl.arange(0, width)
    own = (part * num_samples + sample) * num_experts + expert
    sums = tl.sum(tl.where(is_counted[:, None], scores, 0.0), 0)
    tl.store(partial_sums + own, sums, mask=expert < num_experts)
    first = (part * 2 * num_samples + sample) * num_experts + expert
    counts = tl.sum(tl.where(is_counted[:, None] & chosen, 1, 0), 0)
    tl.store(partial_counts + first, counts, mask=expert < num_experts)
    counts = tl.sum(tl.where(is_counted[:, None] & plain, 1, 0), 0)
    tl.store(partial_counts + first + num_samples * num_experts, counts, mask=expert < num_experts)


@triton_jit
def _gradient_kernel(
    logits,
    chosen_map,
    grad_probs,
    grad_sums,
    is_real,
    result,
    num_rows,
    num_experts,
    scaling,
    topk: tl.constexpr,
    kind: tl.constexpr,
    interpreted: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    """A block of one sample's tokens: gradient of the logits [T, E] from those of probs [T, E] and sums [B, E]."""
    part, sample, num_samples = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    place = part * block + tl.arange(0, block)
    is_row = place < num_rows
    token = (place * num_samples + sample).to(tl.int64)
    column = tl.arange(0, width)[None, :]
    is_expert = column < num_experts
    entry = token[:, None] * num_experts + column
    is_entry = is_row[:, None] & is_expert
    x = tl.load(logits + entry, mask=is_entry, other=0.0).to(tl.float32)
    x = tl.where(is_expert, x, -float("inf"))
    scores = _score(x, kind)
    grad_x = tl.zeros([block, width], tl.float32)
    grad_scores = tl.zeros([block, width], tl.float32)
    if grad_probs is not None:
        chosen = tl.load(chosen_map + entry, mask=is_entry, other=0) != 0
        grad = tl.load(grad_probs + entry, mask=is_entry, other=0.0).to(tl.float32) * scaling
        grad = tl.where(chosen, grad, 0.0)
        if kind == 0:
            # a row without a token has no chosen expert: keep its division by zero out
            weights = tl.where(chosen, _weights(x, scores, chosen, topk, kind), 0.0)
            grad_x = weights * (grad - tl.sum(weights * grad, 1)[:, None])
        elif kind >= 2 and topk > 1:
            total = tl.sum(tl.where(chosen, scores, 0.0), 1)[:, None] + 1e-20
            inner = tl.sum(tl.where(chosen, scores, 0.0) * grad, 1)[:, None] / total
            grad_scores = tl.where(chosen, (grad - inner) / total, 0.0)
        else:
            grad_scores = grad
    if grad_sums is not None:
        grad = tl.load(grad_sums + sample * num_experts + column, mask=is_expert, other=0.0)
        is_counted = is_row
        if is_real is not None:
            is_counted = is_counted & (tl.load(is_real + token, mask=is_row, other=0) != 0)
        grad = tl.where(is_counted[:, None], grad, 0.0)
        if kind >= 2:
            total = tl.sum(scores, 1)[:, None] + 1e-20
            grad_scores += (grad - tl.sum(scores * grad, 1)[:, None] / total) / total
        else:
            grad_scores += grad
    if kind < 2:
        grad_x += scores * (grad_scores - tl.sum(scores * grad_scores, 1)[:, None])
    elif kind == 2:
        grad_x = grad_scores * scores * (1.0 - scores)
    else:
        # d sqrt(softplus) = sigmoid / (2 sqrt(softplus)), and half the score where the softplus underflows
        body = 1.0 / (1.0 + tl.exp(-x)) / (2.0 * tl.where(x < -30.0, 1.0, scores))
        grad_x = grad_scores * tl.where(x < -30.0, 0.5 * scores, body)
    tl.store(result + entry, narrow(grad_x, result.dtype.element_ty, interpreted), mask=is_entry)
