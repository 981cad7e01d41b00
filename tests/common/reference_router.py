"""Routing and its losses in plain fp64 formulas; written without looking at the code under test.

Legend: T tokens, E experts, k experts per token, L logits [T, E].
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class Routing:
    """What the router of one layer did with one microbatch of one rank."""

    logits: torch.Tensor
    """[T, E], with gradient."""
    probs: torch.Tensor
    """[T, E], with gradient; zero where not routed."""
    routing_map: torch.Tensor
    """bool [T, E], after drops and padding."""
    samples: torch.Tensor
    """int64 [T]: the sample that each row belongs to."""


def route(logits, config, samples, forced_ids=None, bias=None):
    """Route L [T, E]; `forced_ids` [T, k] replaces the choice and leaves everything else.

    A capacity holds for each rank, under sequence parallelism for an equal part of the rows.
    """
    k = config.moe_router_topk
    chosen = torch.zeros(logits.shape, dtype=torch.bool)
    weights = torch.zeros_like(logits)
    is_sinkhorn = config.moe_router_load_balancing_type == "sinkhorn"
    balanced = _sinkhorn(logits.detach()) if is_sinkhorn else None
    for t, row in enumerate(logits):
        scores = _scores(row, config, is_sinkhorn)
        if forced_ids is not None:
            ids = forced_ids[t].tolist()
        elif balanced is not None:
            ids = _best(balanced[t], k)
        else:
            ids = _choose(scores if bias is None else scores + bias, config)
        chosen[t, ids] = True
        picked = torch.stack([scores[e] for e in ids])
        if not is_sinkhorn:
            if config.moe_router_score_function == "softmax":
                if not config.moe_router_pre_softmax:
                    picked = picked.exp() / picked.exp().sum()
            elif k > 1:
                picked = picked / (picked.sum() + 1e-20)
            picked = picked * (config.moe_router_topk_scaling_factor or 1.0)
        weights = weights.index_put((torch.full((k,), t), torch.tensor(ids)), picked)
    if config.moe_expert_capacity_factor is not None:
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        pieces = zip(weights.chunk(shards), chosen.chunk(shards), strict=True)
        weights, chosen = map(torch.cat, zip(*[_drop(*piece, config) for piece in pieces], strict=True))
    return Routing(logits, weights, chosen, samples)


def _scores(row, config, is_sinkhorn):
    """Scores [E] of one token; for softmax after the choice these are the logits themselves."""
    if is_sinkhorn:
        return torch.sigmoid(row) if config.moe_router_topk == 1 else row.exp() / row.exp().sum()
    if config.moe_router_score_function == "sigmoid":
        return 1 / (1 + torch.exp(-row))
    if config.moe_router_score_function == "sqrtsoftplus":
        return torch.sqrt(torch.log(1 + torch.exp(row)))
    return row.exp() / row.exp().sum() if config.moe_router_pre_softmax else row


def _best(values, count):
    """Places of the `count` largest values."""
    return sorted(range(len(values)), key=lambda e: -float(values[e]))[:count]


def _choose(scores, config):
    """Top-k, within the best groups if the routing is limited to groups."""
    k, groups, kept = config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk
    scores = scores.detach()
    if groups is None:
        return _best(scores, k)
    size = len(scores) // groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    worth = [sum(sorted((float(scores[e]) for e in group), reverse=True)[: k // kept]) for group in members]
    allowed = [e for g in _best(worth, kept) for e in members[g]]
    return sorted(allowed, key=lambda e: -float(scores[e]))[:k]


def _sinkhorn(logits):
    cost = logits.exp()
    tokens, experts = cost.shape
    d1 = torch.ones(experts, dtype=cost.dtype)
    for _ in range(500):  # the 1e-8 may let d1 drift for ever
        d0 = 1 / (tokens * ((d1 * cost).sum(1) + 1e-8))
        new = 1 / (experts * ((d0[:, None] * cost).sum(0) + 1e-8))
        error, d1 = (new - d1).abs().mean(), new
        if not error > 1e-4:
            break
    return d1 * cost * d0[:, None]


def _drop(weights, chosen, config):
    """Keep C tokens per expert, C = ceil(T k / E * factor)."""
    tokens, experts = weights.shape
    values = weights.detach()
    capacity = math.ceil(tokens * config.moe_router_topk / experts * config.moe_expert_capacity_factor)
    keep = torch.zeros_like(chosen)
    for e in range(experts):
        by_probs = config.moe_token_drop_policy == "probs"
        key = [float(values[t, e]) if by_probs else float(chosen[t, e]) for t in range(tokens)]
        # Chosen tokens before all others, then by weight or by position.
        order = sorted(range(tokens), key=lambda t: (not bool(chosen[t, e]), -key[t], t))
        keep[order[:capacity], e] = True
    final = keep if config.moe_pad_expert_input_to_capacity else keep & chosen
    return weights * (keep & chosen), final


def loss_scores(routing, config):
    """Scores that the balancing losses see, [T, E], rows sum to one."""
    if config.moe_router_score_function == "softmax":
        e = routing.logits.exp()
        return e / e.sum(1, keepdim=True)
    scores = torch.stack([_scores(row, config, False) for row in routing.logits])
    return scores / (scores.sum(1, keepdim=True) + 1e-20)


def plain_counts(scores, k):
    """Tokens per expert [E] of the plain top-k: no bias, no groups, no drop."""
    counts = torch.zeros(scores.shape[1], dtype=torch.float64)
    for row in scores:
        counts[_best(row.detach(), k)] += 1
    return counts


def balance_loss(score_sums, counts, tokens, config):
    """E / (k T^2) sum_e s_e c_e, without the coefficient."""
    return config.num_moe_experts / (config.moe_router_topk * tokens**2) * (score_sums * counts).sum()


def step_losses(routings, config):
    """Auxiliary losses of one layer in one step, without coefficients.

    `routings[m][d]` is microbatch m on data parallel rank d; returns {type: [[scalar per d] per m]}.
    """
    values = {name: [[None] * len(row) for row in routings] for name in (*config.balancing_types, "z_loss")}
    k, running = config.moe_router_topk, torch.zeros(config.num_moe_experts, dtype=torch.float64)
    for m, row in enumerate(routings):
        scores = [loss_scores(r, config) for r in row]
        counts = [plain_counts(s, k) for s in scores]
        running = running + torch.stack(counts).sum(0)
        for d, routing in enumerate(row):
            tokens, sums = len(scores[d]), scores[d].sum(0)
            for name in config.balancing_types:
                if name == "aux_loss":
                    values[name][m][d] = balance_loss(sums, counts[d], tokens, config)
                elif name == "global_aux_loss":
                    values[name][m][d] = balance_loss(sums, running / (m + 1), tokens * len(row), config)
                elif name == "seq_aux_loss":
                    values[name][m][d] = _sequence_loss(scores[d], routing.samples, config)
            values["z_loss"][m][d] = (torch.log(routing.logits.exp().sum(1)) ** 2).mean()
    return {name: rows for name, rows in values.items() if rows[0][0] is not None}


def _sequence_loss(scores, samples, config):
    """The mean over samples of the balance loss of one sample."""
    losses = []
    for sample in samples.unique():
        own = scores[samples == sample]
        losses.append(balance_loss(own.sum(0), plain_counts(own, config.moe_router_topk), len(own), config))
    return torch.stack(losses).mean()
