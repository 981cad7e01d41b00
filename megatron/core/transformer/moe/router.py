"""The router: one linear layer that scores experts, and everything that happens to its scores.

Order in one forward pass:

1. jitter of the input (training)
2. gate: logits = input @ weight^T, in `moe_router_dtype`
3. forced balance of the logits (benchmarks only)
4. z-loss, attached to the logits
5. choice and weights: top-k by the routing rule, or sinkhorn
6. capacity: drop or pad
7. balancing losses, computed from the logits, attached to the probabilities
8. counts of the dispatched map, for the expert bias and the log

With `--moe-router-fusion` one kernel does step 5 and counts and adds up what 7 and 8 need (`fused_router`); a GPU has
it for all routing rules but group-limited and sinkhorn, which keep the plain form.

Steps 4, 7 and 8 run in training with gradients enabled. Activation recompute runs the first pass without gradients, so
losses are attached and tokens counted once, in the second.

Legend: s tokens of a sample on this rank, B samples, h width, T = s * B tokens, E experts, k experts per token.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fusions.fused_gate import uses_wide_products, wide_linear
from megatron.core.fusions.fused_router import RoutedTokens, fused_routing
from megatron.core.fusions.fused_row_layout import uses_kernels
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.parameter import hidden_init, new_parameter
from megatron.core.param_attrs import ParamAttrs
from megatron.core.pipeline_parallel.overlap.protocol import SavedRouting
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    random_region,
)
from megatron.core.transformer.moe.capacity import apply_capacity, expert_capacity
from megatron.core.transformer.moe.exact_buffers import ExactBuffersModule
from megatron.core.transformer.moe.load_balance import LoadBalancer, RoutingSums
from megatron.core.transformer.moe.moe_logging import LayerMetrics
from megatron.core.transformer.moe.topk import (
    RoutingRule,
    routing_weights,
    scatter_routing,
    score_experts,
    select_topk,
    selection_scores,
    sinkhorn_choice,
    sinkhorn_weights,
)
from megatron.core.utils.logging import get_logger, log_single_rank

_ROUTER_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}
_LOGGER = get_logger(__name__)


class _RandomLogits(torch.autograd.Function):
    """Standard normal numbers in place of the logits; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            return torch.randn_like(logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class TopKRouter(MegatronModule, ExactBuffersModule):
    """Scores experts and chooses k of them for each token."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        layer_number: int | None = None,
    ) -> None:
        super().__init__(config)
        num_experts = config.num_moe_experts
        assert num_experts is not None, "num_moe_experts=None: a router needs experts"
        self.num_experts = num_experts
        self.topk = config.moe_router_topk
        self.rule = RoutingRule.from_config(config)
        self.layer_number = layer_number
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        attrs = ParamAttrs(hidden_init(config), sequence_parallel=config.sequence_parallel)
        self.weight = new_parameter(config, (num_experts, config.hidden_size), attrs)
        self.metrics = LayerMetrics(layer_number)
        self.balancer = LoadBalancer(config, groups, self.metrics)
        self.is_sinkhorn = "sinkhorn" in config.balancing_types
        self.expert_bias: torch.Tensor | None
        self.tokens_per_expert: torch.Tensor
        self.forced_bias: torch.Tensor | None
        has_bias = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32) if has_bias else None)
        counts = torch.zeros(num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.register_buffer("forced_bias", None, persistent=False)
        self.to(self.weight.device)
        self._warn_about_benchmark_modes()

    def _warn_about_benchmark_modes(self) -> None:
        for name in ("moe_router_force_load_balancing", "moe_router_force_biased"):
            value = getattr(self.config, name)
            if value and self.layer_number in (None, 1):
                message = f"{name}={value}: tokens are routed at random, for benchmarks only; the model learns nothing"
                log_single_rank(_LOGGER, logging.WARNING, message)

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        saved: SavedRouting | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route: hidden [s, B, h], mask bool [s, B] with True for padding -> probs [T, E], routing map bool [T, E].

        `saved` takes the choice of the first pass of a recomputed layer and gives it to the second.

        Dtype: probs have the dtype of the logits: `moe_router_dtype`, or the parameters' if that is unset.
        Host: no synchronisation, except with sinkhorn balancing.
        """
        return self.routing(self.gate(self.apply_input_jitter(hidden_states)), padding_mask, saved)

    def graph_capture_blockers(self) -> list[str]:
        """Why a step with this router cannot be captured."""
        if not self.is_sinkhorn:
            return []
        return [
            "cuda_graph_impl='full_iteration' with moe_router_load_balancing_type='sinkhorn': the host reads after "
            "every round whether one more is needed; use --moe-router-load-balancing-type aux_loss."
        ]

    def apply_input_jitter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Multiply [s, B, h] by U(1 - eps, 1 + eps), element by element, in training."""
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return hidden_states
        with random_region(self.config.sequence_parallel):
            return hidden_states * torch.empty_like(hidden_states).uniform_(1.0 - eps, 1.0 + eps)

    def gate(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits in the router dtype, never narrower than the parameters: [s, B, h] -> [s, B, E]."""
        wanted = _ROUTER_DTYPES[self.config.moe_router_dtype]
        dtype = self.weight.dtype if wanted is None else torch.promote_types(wanted, self.weight.dtype)
        if uses_wide_products(hidden_states, self.weight, dtype):
            return wide_linear(hidden_states, self.weight)
        return F.linear(hidden_states.to(dtype), self.weight.to(dtype))

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None, saved: SavedRouting | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps 3 to 8: logits [s, B, E], mask bool [s, B] -> probs [T, E], routing map bool [T, E]."""
        logits = self.force_logits(logits)
        is_recorded = self.training and torch.is_grad_enabled()
        is_real = None if padding_mask is None else ~padding_mask.view(logits.shape[:-1])
        is_balanced = is_recorded and self.balancer.is_active
        token_counts = self.balancer.count_tokens(logits.shape[0] * logits.shape[1], is_real) if is_balanced else (0, 0)
        if is_balanced:
            logits = self.balancer.attach_z_loss(logits, is_real, token_counts[1])
        sums: RoutingSums | None = None
        if self.config.moe_router_fusion and self.has_kernels_for(logits):
            probs, routing_map, sums = self.choose_fused(logits, is_real, saved)
        else:
            probs, routing_map = self.choose(logits.flatten(0, 1), saved)
        if self.config.moe_expert_capacity_factor is not None:
            probs, routing_map = self._apply_capacity(probs, routing_map, saved)
        if is_balanced:
            probs = self.balancer.attach_balancing_losses(probs, logits, is_real, token_counts, sums)
        if is_recorded:
            has_counts = sums is not None and self.config.moe_expert_capacity_factor is None
            self._count(routing_map, is_real, sums.counts if has_counts and sums is not None else None)
        return probs, routing_map

    def force_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Replace or shift the logits [s, B, E] for benchmarks; the router still gets its gradient."""
        if self.config.moe_router_force_load_balancing:
            return _RandomLogits.apply(logits)
        std = self.config.moe_router_force_biased
        if not std:
            return logits
        if std > 0:
            return logits + self._draw_forced_bias(logits, std)
        if self.forced_bias is None:
            self.forced_bias = self._draw_forced_bias(logits, -std)
        return logits + self.forced_bias

    def _draw_forced_bias(self, logits: torch.Tensor, std: float) -> torch.Tensor:
        """One normal number per expert, [E]; logits [s, B, E] give dtype and device."""
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            return torch.randn(self.num_experts, dtype=logits.dtype, device=logits.device) * std

    def choose(self, logits: torch.Tensor, saved: SavedRouting | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Choice and weights before any drop: logits [T, E] -> probs [T, E], routing map bool [T, E]."""
        saved = SavedRouting() if saved is None else saved
        if self.is_sinkhorn:
            if saved.indices is None:
                saved.indices = sinkhorn_choice(logits, self.topk, self.training)
            return scatter_routing(
                saved.indices, sinkhorn_weights(logits, saved.indices), self.num_experts, logits.dtype
            )
        scores = score_experts(logits, self.rule)
        if saved.indices is None:
            saved.indices = self.select_experts(selection_scores(logits, scores, self.rule, self.expert_bias))
        indices = saved.indices
        weights = routing_weights(scores, indices, self.rule)
        return scatter_routing(indices, weights, self.num_experts, logits.dtype)

    def has_kernels_for(self, logits: torch.Tensor) -> bool:
        """True if kernels can route logits [s, B, E]."""
        has_rule = not self.is_sinkhorn and self.rule.num_groups is None
        return has_rule and uses_kernels(logits) and logits.dtype != torch.float64

    def choose_fused(
        self, logits: torch.Tensor, is_real: torch.Tensor | None, saved: SavedRouting | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, RoutingSums]:
        """`choose` by kernels: logits [s, B, E], mask bool [s, B] -> probs [T, E], map bool [T, E], and their sums."""
        saved = SavedRouting() if saved is None else saved
        mask = None if is_real is None else is_real.reshape(-1)
        tokens = RoutedTokens(logits.shape[1], self.expert_bias, saved.indices, mask)
        routed = fused_routing(logits.flatten(0, 1), self.rule.for_kernels(), tokens)
        saved.indices = routed.indices
        return routed.probs, routed.routing_map, RoutingSums(routed.score_sums, routed.plain_counts, routed.counts)

    def select_experts(self, scores: torch.Tensor) -> torch.Tensor:
        """Turn selection scores [T, E] into expert ids [T, k]; the one place to override for a forced routing."""
        return select_topk(scores, self.rule)

    def _apply_capacity(
        self, probs: torch.Tensor, routing_map: torch.Tensor, saved: SavedRouting | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Probs [T, E], map bool [T, E] -> the same two after drop or padding."""
        config = self.config
        if saved is not None and saved.routing_map is not None:
            return probs * saved.routing_map, saved.routing_map
        assert config.moe_expert_capacity_factor is not None, "no capacity without a factor"
        num_pairs = probs.shape[0] * self.topk
        capacity = expert_capacity(num_pairs, self.num_experts, config.moe_expert_capacity_factor)
        is_padded = config.moe_pad_expert_input_to_capacity
        probs, routing_map = apply_capacity(probs, routing_map, capacity, config.moe_token_drop_policy, is_padded)
        if saved is not None:
            saved.routing_map = routing_map
        return probs, routing_map

    @torch.no_grad()
    def _count(
        self, routing_map: torch.Tensor, is_real: torch.Tensor | None, counts: torch.Tensor | None = None
    ) -> None:
        """Add the column sums of the dispatched map bool [T, E]; padding (False in bool [s, B]) does not count.

        `counts` int64 [B, E] are these sums for each sample, if they are known.
        """
        if counts is None:
            counts = routing_map if is_real is None else routing_map & is_real.reshape(-1, 1)
        self.tokens_per_expert += counts.sum(dim=0)
        self.metrics.add_forward()

    def step_counts(self) -> torch.Tensor:
        """Tokens per expert of this rank in this step, int64 [E]; gradient finalisation sums it over TPxDPxCP."""
        return self.tokens_per_expert

    @torch.no_grad()
    def apply_step_counts(self, summed: torch.Tensor) -> None:
        """End a step: move the expert bias towards balance, log the load, start counting anew.

        `summed` int64 [E]. The bias rises by the update rate where an expert got less than the mean and falls where it
        got more. Host: no synchronisation.
        """
        if self.expert_bias is not None:
            # integers: total - E * count has the sign of mean(count) - count
            direction = torch.sign(summed.sum() - self.num_experts * summed)
            self.expert_bias += direction.to(torch.float32) * self.config.moe_router_bias_update_rate
        self.metrics.add_step_load(summed)
        self.tokens_per_expert.zero_()
        self.balancer.reset_step()
