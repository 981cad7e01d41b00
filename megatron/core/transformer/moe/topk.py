"""From router logits to a choice of experts and their weights, as pure functions.

Four steps, so that a test can replace the choice and keep the rest:

    scores  = score_experts(logits, rule)                       what an expert is worth to a token
    indices = select_topk(selection_scores(...), rule)          the choice; no gradient
    weights = routing_weights(scores, indices, rule)            how the chosen experts are mixed
    probs, routing_map = scatter_routing(...)                   dense form, zero outside the choice

| variant         | scores             | weights                                     |
|-----------------|--------------------|---------------------------------------------|
| softmax, after  | logits             | softmax over the chosen logits              |
| softmax, before | softmax over all   | as they are: they do not sum to one         |
| sigmoid         | sigmoid            | divided by their sum when several are chosen|
| sqrtsoftplus    | sqrt(softplus)     | likewise                                    |

The bias shifts the choice only; the scaling factor multiplies last. All of it runs in fp32 at least.

Legend: T tokens, E experts, k experts per token, G groups of experts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_router import ScoreRule
from megatron.core.utils.upcast import upcast

if TYPE_CHECKING:
    from megatron.core.configs.transformer import TransformerConfig

_NORM_EPSILON = 1e-20
_SOFTPLUS_TAIL = -30.0
_MAX_SINKHORN_ROUNDS = 500


@dataclass(frozen=True)
class RoutingRule:
    """Everything that decides how logits become a routing."""

    topk: int
    """Experts per token."""

    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """How logits become scores."""

    use_pre_softmax: bool = False
    """Softmax over all experts, before the choice; without meaning for the other score functions."""

    num_groups: int | None = None
    """Groups of experts; None: every expert may be chosen."""

    group_topk: int | None = None
    """Groups that stay in the choice."""

    scaling_factor: float | None = None
    """Multiplies the final weights."""

    @classmethod
    def from_config(cls, config: "TransformerConfig") -> "RoutingRule":
        """Read the rule from the fields of a configuration."""
        return cls(
            topk=config.moe_router_topk,
            score_function=config.moe_router_score_function,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
        )

    def for_kernels(self) -> ScoreRule:
        """The rule as the kernels take it; groups are none of their business."""
        is_before = self.score_function == "softmax" and self.use_pre_softmax
        scaling = 1.0 if self.scaling_factor is None else self.scaling_factor
        return ScoreRule(self.topk, "pre_softmax" if is_before else self.score_function, scaling)


def score_experts(logits: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Scores of all experts, [T, E] -> [T, E], fp32 or wider."""
    logits = upcast(logits)
    if rule.score_function == "sigmoid":
        return torch.sigmoid(logits)
    if rule.score_function == "sqrtsoftplus":
        return sqrt_softplus(logits)
    return torch.softmax(logits, dim=-1) if rule.use_pre_softmax else logits


def sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + exp(x))) for x [any], with a finite gradient where softplus underflows to zero."""
    is_tail = x < _SOFTPLUS_TAIL
    body = F.softplus(x.clamp(min=_SOFTPLUS_TAIL)).sqrt()
    return torch.where(is_tail, torch.exp(0.5 * x.clamp(max=0.0)), body)


def selection_scores(
    logits: torch.Tensor, scores: torch.Tensor, rule: RoutingRule, expert_bias: torch.Tensor | None
) -> torch.Tensor:
    """What the choice is made by: logits [T, E], scores [T, E], bias [E] -> [T, E]. No gradient.

    Every score function is increasing, so where nothing is added to the scores the logits choose the same experts,
    and they do not tie where the scores saturate or underflow.
    """
    if expert_bias is not None:
        return scores.detach() + expert_bias
    return scores.detach() if rule.num_groups is not None else upcast(logits.detach())


def select_topk(scores: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Experts of each token, best first: selection scores [T, E] -> expert ids [T, k]. No gradient.

    With groups, a group counts as much as the sum of its best k / group_topk scores, and only the best group_topk
    groups stay in the choice.
    """
    scores = scores.detach()
    if rule.num_groups is not None and rule.group_topk is not None:
        grouped = scores.view(scores.shape[0], rule.num_groups, -1)  # [T, G, E/G]
        group_scores = grouped.topk(rule.topk // rule.group_topk, dim=-1).values.sum(dim=-1)  # [T, G]
        kept = group_scores.topk(rule.group_topk, dim=-1).indices
        is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        scores = grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).view_as(scores)
    return scores.topk(rule.topk, dim=-1).indices


def routing_weights(scores: torch.Tensor, indices: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Weights of the chosen experts: scores [T, E], expert ids [T, k] -> [T, k]."""
    weights = scores.gather(1, indices)
    if rule.score_function == "softmax":
        if not rule.use_pre_softmax:
            weights = torch.softmax(weights, dim=-1)
    elif rule.topk > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _NORM_EPSILON)
    return weights if rule.scaling_factor is None else weights * rule.scaling_factor


def scatter_routing(
    indices: torch.Tensor, weights: torch.Tensor, num_experts: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense form of a routing: ids [T, k], weights [T, k] -> probs [T, E] of `dtype`, routing map bool [T, E]."""
    shape = (indices.shape[0], num_experts)
    probs = weights.new_zeros(shape, dtype=dtype).scatter(1, indices, weights.to(dtype))
    routing_map = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter_(1, indices, True)
    return probs, routing_map


def topk_routing(
    logits: torch.Tensor, rule: RoutingRule, expert_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """All four steps: logits [T, E], bias [E] -> probs [T, E] in the dtype of the logits, routing map bool [T, E]."""
    scores = score_experts(logits, rule)
    indices = select_topk(selection_scores(logits, scores, rule, expert_bias), rule)
    weights = routing_weights(scores, indices, rule)
    return scatter_routing(indices, weights, logits.shape[1], logits.dtype)


@torch.no_grad()
def sinkhorn(cost_logits: torch.Tensor, tolerance: float = 1e-4) -> torch.Tensor:
    """Balance exp(logits) so that rows and columns have equal sums, [T, E] -> [T, E], fp32 or wider.

    Alternates the two scalings until the column scaling moves by at most `tolerance` in the mean. With a large column
    scaling that never happens: the 1e-8 lets the whole scaling drift for ever, which changes no choice.
    Host: one read per round, because the number of rounds depends on the data.
    """
    cost = torch.exp(upcast(cost_logits))
    num_tokens, num_experts = cost.shape
    column = cost.new_ones(num_experts)
    for _ in range(_MAX_SINKHORN_ROUNDS):
        row = 1.0 / (num_tokens * ((column * cost).sum(dim=1) + 1e-8))  # [T]
        previous, column = column, 1.0 / (num_experts * ((row.unsqueeze(1) * cost).sum(dim=0) + 1e-8))  # [E]
        if not (previous - column).abs().mean() > tolerance:
            break
    return column * cost * row.unsqueeze(1)


def sinkhorn_choice(logits: torch.Tensor, topk: int, is_training: bool) -> torch.Tensor:
    """Choose by the balanced matrix in training, by the logits in evaluation: [T, E] -> expert ids [T, k]."""
    selection = sinkhorn(logits.detach()) if is_training else logits.detach()
    return selection.topk(topk, dim=-1).indices


def sinkhorn_weights(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Weights: the plain softmax (sigmoid for one expert) at the chosen places, [T, E], ids [T, k] -> [T, k]."""
    wide = upcast(logits)
    scores = torch.sigmoid(wide) if indices.shape[1] == 1 else torch.softmax(wide, dim=-1)
    return scores.gather(1, indices)


def sinkhorn_routing(logits: torch.Tensor, topk: int, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Both steps: [T, E] -> probs [T, E], map bool [T, E]."""
    indices = sinkhorn_choice(logits, topk, is_training)
    return scatter_routing(indices, sinkhorn_weights(logits, indices), logits.shape[1], logits.dtype)
