"""Balancing losses and the z-loss of a router.

They are not part of the objective: each is attached to an activation (core/aux_loss_scale) and injects its gradient in
backward. Let s[t, e] be the softmax over all experts, or the sigmoid family divided by its row sum, and let c_e count
the tokens whose *plain* top-k of s contains e: no bias, no groups, so this choice can differ from the one dispatched.

| type            | value on this rank                          | c is summed over                                 |
|-----------------|---------------------------------------------|--------------------------------------------------|
| aux_loss        | CE * E / (k * N^2) * sum_e c_e * sum_t s    | TPxCP                                            |
| seq_aux_loss    | the mean over samples of the same           | TPxCP, for each sample                           |
| global_aux_loss | as aux_loss                                 | TPxDPxCP, averaged over the microbatches so far  |
| z_loss          | coeff / N * sum_t logsumexp_e(L)^2          | -                                                |

N is the number of real tokens over the same group (of one sample for seq_aux_loss; over TPxCP for the z-loss). s stays
local, so the values of the group's ranks add up, to CE for a perfect balance. Padded tokens leave s, c and N.

With per-token loss all gradients are later divided by the token count of the whole batch, so each loss is multiplied
by the real tokens of the TPxCP group first: the mean over microbatches and replicas becomes a mean over tokens, and the
strength depends neither on the layout nor on the number of microbatches.

Legend: T tokens of this rank, s tokens of one sample on this rank, B samples, E experts, k experts per token.
"""

import dataclasses
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core.aux_loss_scale import attach
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.exact_buffers import ExactBuffersModule
from megatron.core.transformer.moe.moe_logging import LOSS_LABELS, LayerMetrics
from megatron.core.transformer.moe.topk import RoutingRule, score_experts
from megatron.core.utils.collectives import all_reduce
from megatron.core.utils.groups import group_size
from megatron.core.utils.upcast import upcast

if TYPE_CHECKING:
    from megatron.core.configs.transformer import TransformerConfig

_NORM_EPSILON = 1e-20


@dataclasses.dataclass(frozen=True)
class RoutingSums:
    """What a kernel has added up over the real tokens of each sample."""

    scores: torch.Tensor
    """fp32 [B, E] with gradient."""

    plain_counts: torch.Tensor
    """int64 [B, E] by the plain top-k."""

    counts: torch.Tensor
    """int64 [B, E] by the choice that is dispatched."""


@dataclasses.dataclass
class LossInputs:
    """What all balancing losses of one forward pass share."""

    scores: torch.Tensor
    """[s, B, E] with gradient, zero for padded tokens; or their sums, [1, B, E]."""

    chosen: torch.Tensor
    """int64 [s, B, E], one where the plain top-k of a real token picks the expert; or the sums, [1, B, E]."""

    sample_length: int
    """s"""

    num_local_tokens: torch.Tensor | int
    """Real tokens of this rank."""

    num_group_tokens: torch.Tensor | int
    """Real tokens over TPxCP."""

    is_real: torch.Tensor | None
    """bool [s, B]; None without a padding mask."""


def loss_scores(logits: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Scores that the balancing losses see, [T, E] -> [T, E], rows sum to one."""
    if rule.score_function == "softmax":
        return torch.softmax(upcast(logits), dim=-1)
    scores = score_experts(logits, rule)
    return scores / (scores.sum(dim=-1, keepdim=True) + _NORM_EPSILON)


def plain_choice(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """Top-k of the scores without bias and groups, [T, E] -> int64 0/1 [T, E]. Scores increase with the logits."""
    indices = upcast(logits.detach()).topk(topk, dim=-1).indices
    return torch.zeros(logits.shape, dtype=torch.int64, device=logits.device).scatter_(1, indices, 1)


def balancing_loss(
    scores: torch.Tensor, counts: torch.Tensor, num_tokens: torch.Tensor | int, topk: int, coeff: float
) -> torch.Tensor:
    """Coeff * E / (k * N^2) * sum(c * sum_t s): scores [t, ..., E], counts [..., E], N scalar or [...] -> [...]."""
    num_experts = scores.shape[-1]
    products = (scores.sum(dim=0) * counts).sum(dim=-1)
    return products * (coeff * num_experts / topk) / num_tokens**2


def sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum of `values` [any] over a group; the local tensor is left as it is."""
    if group_size(group) == 1:
        return values
    total = values.clone()
    all_reduce(total, group)
    return total


class LoadBalancer(ExactBuffersModule):
    """The balancing losses of one router: values, attachment, metrics, running counts of the global loss."""

    def __init__(self, config: "TransformerConfig", groups: ProcessGroupCollection, metrics: LayerMetrics) -> None:
        super().__init__()
        self.rule = RoutingRule.from_config(config)
        pairs = zip(config.balancing_types, config.aux_loss_coefficients, strict=True)
        self.coefficients = {kind: coeff for kind, coeff in pairs if kind in LOSS_LABELS and coeff != 0.0}
        self.z_coefficient = config.moe_z_loss_coeff or 0.0
        self.is_per_token = config.calculate_per_token_loss
        self.groups = groups
        self.metrics = metrics
        self.global_counts: torch.Tensor | None
        self.num_microbatches: torch.Tensor | None
        running = "global_aux_loss" in self.coefficients
        counts = torch.zeros(config.num_moe_experts or 0, dtype=torch.int64) if running else None
        self.register_buffer("global_counts", counts, persistent=False)
        number = torch.zeros((), dtype=torch.int64) if running else None
        self.register_buffer("num_microbatches", number, persistent=False)

    @property
    def is_active(self) -> bool:
        """True if there is any loss to attach."""
        return bool(self.coefficients) or self.z_coefficient != 0.0

    def reset_step(self) -> None:
        """Forget the running counts of the step that has ended."""
        if self.global_counts is not None and self.num_microbatches is not None:
            self.global_counts.zero_()
            self.num_microbatches.zero_()

    def count_tokens(
        self, num_rows: int, is_real: torch.Tensor | None
    ) -> tuple[torch.Tensor | int, torch.Tensor | int]:
        """Real tokens of this rank and of TPxCP; `is_real` is bool [s, B].

        Host: no synchronisation. Without a mask both are known without communication.
        """
        if is_real is None:
            return num_rows, num_rows * group_size(self.groups.tp_cp)
        local = is_real.sum()
        return local, sum_over(local, self.groups.tp_cp)

    def attach_z_loss(
        self, logits: torch.Tensor, is_real: torch.Tensor | None, num_group_tokens: torch.Tensor | int
    ) -> torch.Tensor:
        """Attach the z-loss to the logits [s, B, E] and return them."""
        if self.z_coefficient == 0.0:
            return logits
        squares = torch.logsumexp(upcast(logits), dim=-1) ** 2  # [s, B]
        if is_real is not None:
            squares = squares * is_real
        mean = squares.sum() / at_least_one(num_group_tokens)
        return self._attach("z_loss", logits, mean * self.z_coefficient, self.z_coefficient, num_group_tokens)

    def attach_balancing_losses(
        self,
        probs: torch.Tensor,
        logits: torch.Tensor,
        is_real: torch.Tensor | None,
        token_counts: tuple[torch.Tensor | int, torch.Tensor | int],
        sums: RoutingSums | None = None,
    ) -> torch.Tensor:
        """Attach every active loss to the probabilities [T, E] and return them; logits [s, B, E], mask bool [s, B].

        `sums` saves going through the logits again.
        """
        if not self.coefficients:
            return probs
        if sums is None:
            scores, chosen = self._scores_and_choice(logits, is_real)
        else:
            scores, chosen = sums.scores.unsqueeze(0), sums.plain_counts.unsqueeze(0)
        inputs = LossInputs(scores, chosen, logits.shape[0], *token_counts, is_real)
        values = {"aux_loss": self._aux_loss, "seq_aux_loss": self._seq_aux_loss, "global_aux_loss": self._global_loss}
        for kind, coeff in self.coefficients.items():
            probs = self._attach(kind, probs, values[kind](inputs, coeff), coeff, inputs.num_group_tokens)
        return probs

    def _scores_and_choice(
        self, logits: torch.Tensor, is_real: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and int64 0/1 of the plain top-k, [s, B, E] each, zero for padding; logits [s, B, E], mask [s, B]."""
        flat = logits.flatten(0, 1)
        scores = loss_scores(flat, self.rule).view_as(logits)
        chosen = plain_choice(flat, self.rule.topk).view(logits.shape)
        if is_real is None:
            return scores, chosen
        return scores * is_real.unsqueeze(-1), chosen * is_real.unsqueeze(-1)

    def _attach(
        self,
        kind: str,
        activation: torch.Tensor,
        loss: torch.Tensor,
        coeff: float,
        num_group_tokens: torch.Tensor | int,
    ) -> torch.Tensor:
        """Record loss / coeff, then let the loss (a scalar) ride on `activation` [any]."""
        self.metrics.add(LOSS_LABELS[kind], loss.detach() / coeff)
        return attach(activation, loss * num_group_tokens if self.is_per_token else loss)

    def _aux_loss(self, inputs: LossInputs, coeff: float) -> torch.Tensor:
        counts = sum_over(inputs.chosen.sum(dim=(0, 1)), self.groups.tp_cp)  # [E]
        num_tokens = at_least_one(inputs.num_group_tokens)
        return balancing_loss(inputs.scores.flatten(0, 1), counts, num_tokens, self.rule.topk, coeff)

    def _seq_aux_loss(self, inputs: LossInputs, coeff: float) -> torch.Tensor:
        counts = sum_over(inputs.chosen.sum(dim=0), self.groups.tp_cp)  # [B, E]
        num_tokens: torch.Tensor | int = inputs.sample_length * group_size(self.groups.tp_cp)
        if inputs.is_real is not None:
            num_tokens = sum_over(inputs.is_real.sum(dim=0), self.groups.tp_cp)  # [B]
        per_sample = balancing_loss(inputs.scores, counts, at_least_one(num_tokens), self.rule.topk, coeff)
        return per_sample.mean()

    def _global_loss(self, inputs: LossInputs, coeff: float) -> torch.Tensor:
        assert self.global_counts is not None, "no running counts for this loss"
        assert self.num_microbatches is not None, "no running counts for this loss"
        group = self.groups.tp_dp_cp
        self.global_counts.add_(sum_over(inputs.chosen.sum(dim=(0, 1)), group))
        self.num_microbatches.add_(1)
        counts = self.global_counts / self.num_microbatches.to(inputs.scores.dtype)
        num_tokens: torch.Tensor | int
        if isinstance(inputs.num_local_tokens, torch.Tensor):
            num_tokens = sum_over(inputs.num_local_tokens, group)
        else:
            num_tokens = inputs.num_local_tokens * group_size(group)
        return balancing_loss(inputs.scores.flatten(0, 1), counts, at_least_one(num_tokens), self.rule.topk, coeff)


def at_least_one(count: torch.Tensor | int) -> torch.Tensor | int:
    """Guard a divisor, a number or a tensor [any], against batches without any real token."""
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
