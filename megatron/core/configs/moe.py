"""Mixture-of-experts layers: which layers, how many experts, routing, balancing, capacity, dispatch."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob
from megatron.core.configs.list_expression import int_or_list

BalancingType = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]


@dataclasses.dataclass(kw_only=True)
class MoEConfig(ConfigTopic):
    """Mixture of experts."""

    num_moe_experts: int | None = knob(None, flag="--num-experts", dest="num_experts")
    """Routed experts of a MoE layer; unset: the model is dense."""

    moe_layer_freq: int | list[int] = knob(1, parse=int_or_list)
    """Which layers are MoE: an integer N (layer i is MoE iff i % N == 0) or a list such as ([0]*3+[1]*58)."""

    moe_ffn_hidden_size: int = knob(None)
    """Width of one expert; unset: ffn_hidden_size."""

    moe_grouped_gemm: bool = False
    """Run the local experts of a layer as one grouped GEMM instead of a loop."""

    moe_apply_probs_on_input: bool = False
    """Multiply the routing probability into an expert's input instead of its hidden activation; top-1 only."""

    moe_shared_expert_intermediate_size: int | None = None
    """Total width of the shared experts; unset: no shared expert."""

    moe_shared_expert_gate: bool = False
    """Multiply the shared experts' output by a learned sigmoid gate."""

    moe_router_topk: int = 2
    """Experts per token."""

    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the top-k, instead of over the chosen ones."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """How logits become scores."""

    moe_router_topk_scaling_factor: float | None = None
    """Multiplies the final routing probabilities."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Dtype of the router's matrix product and of the weighted combine; unset: the parameter dtype."""

    moe_router_num_groups: int | None = None
    """Groups of experts for group-limited routing."""

    moe_router_group_topk: int | None = None
    """Groups that one token may use."""

    moe_router_load_balancing_type: BalancingType | list[BalancingType] = knob("aux_loss")
    """Balancing scheme, or several of them."""

    moe_aux_loss_coeff: float | list[float] = 0.0
    """Coefficient of the balancing loss, one for each listed scheme."""

    moe_z_loss_coeff: float | None = None
    """Coefficient of the z-loss on the router logits."""

    moe_input_jitter_eps: float | None = None
    """Multiply the router's input by U(1 - eps, 1 + eps) in training."""

    moe_router_enable_expert_bias: bool = False
    """Balance without a loss: a bias per expert, added for the selection only."""

    moe_router_bias_update_rate: float = 0.001
    """How far the expert bias moves in each optimizer step."""

    moe_router_force_load_balancing: bool = False
    """Random logits, for benchmarks only."""

    moe_router_force_biased: float | None = None
    """Standard deviation of a random bias per expert, for benchmarks only; negative: drawn once and kept."""

    moe_token_dispatcher_type: str = "allgather"
    """How tokens travel to the ranks of their experts."""

    moe_flex_dispatcher_backend: str = "deepep"
    """What moves the tokens of the flex dispatcher: hybridep (see its engines) or deepep (DeepEP's Buffer)."""

    moe_hybridep_engine: str = "auto"
    """Engine of the hybridep backend; auto: symmetric memory if all expert ranks reach each other, else collectives."""

    moe_dispatch_fwd_dtype: Literal["bf16", "fp8"] = "bf16"
    """Rows that the flex dispatcher sends in forward: bf16 for as they are, fp8 for codes with 1 x 128 scales."""

    moe_flex_dispatcher_num_sms: int | None = None
    """SMs for the flex dispatcher's kernels; with overlap experts leave as many free; unset: the engine's choice."""

    moe_expert_rank_capacity_factor: float | None = None
    """Rows that an expert rank provides for, relative to a balanced load; more of them repeat the step with more."""

    moe_rank_capacity_tiers: list[float] = knob([])
    """Larger factors with which a step of too many rows is repeated in turn; at last it is repeated without a limit."""

    moe_router_fusion: bool = False
    """One kernel for scores, choice, weights and the sums of the balancing losses; not for groups and sinkhorn."""

    moe_permute_fusion: bool = False
    """Kernels that order rows by expert and add up those of a token; the flex dispatcher always has them."""

    moe_expert_capacity_factor: float | None = None
    """Capacity of an expert relative to a balanced load; unset or negative: no token is dropped."""

    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert to its capacity, so that shapes are static."""

    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens are dropped above the capacity: those with the lowest probability, or the last ones."""

    moe_per_layer_logging: bool = False
    """Log the balancing losses of each layer."""

    def derive(self) -> None:
        """Fold upstream's ways of saying `off` into None."""
        if self.num_moe_experts == 0:
            self.replace("num_moe_experts", None, "--num-experts 0: a dense model")
        if self.moe_expert_capacity_factor is not None and self.moe_expert_capacity_factor < 0:
            self.replace("moe_expert_capacity_factor", None, "a negative capacity factor: nothing is dropped")
        balancing, coefficient = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if isinstance(balancing, list) and len(balancing) == 1:
            self.replace("moe_router_load_balancing_type", balancing[0], "a list of one")
        if isinstance(coefficient, list) and len(coefficient) == 1:
            self.replace("moe_aux_loss_coeff", coefficient[0], "a list of one")

    def check(self) -> list[Violation]:
        """Routing fits the number of experts; balancing and capacity fit each other."""
        if self.num_moe_experts is None:
            return []
        return (
            self._check_sizes()
            + self._check_topk()
            + self._check_groups()
            + self._check_balancing()
            + self._check_capacity()
        )

    @property
    def balancing_types(self) -> list[str]:
        """The balancing schemes as a list, also when there is one."""
        value = self.moe_router_load_balancing_type
        return list(value) if isinstance(value, list) else [value]

    @property
    def aux_loss_coefficients(self) -> list[float]:
        """The balancing coefficients as a list, also when there is one."""
        value = self.moe_aux_loss_coeff
        return list(value) if isinstance(value, list) else [value]

    def _check_sizes(self) -> list[Violation]:
        """Widths are positive, strengths not negative."""
        found = []
        for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
            value = getattr(self, name)
            if value is not None and value < 1 and name not in self.origins:
                remedy = f"set --{name.replace('_', '-')} to a positive number or drop it"
                found.append(violation(self, name, "an expert has a width", remedy))
        if self.moe_flex_dispatcher_num_sms is not None and self.moe_flex_dispatcher_num_sms < 1:
            remedy = "set --moe-flex-dispatcher-num-sms to 1 or more, or drop it for the engine's own choice"
            found.append(violation(self, "moe_flex_dispatcher_num_sms", "a kernel runs on at least one", remedy))
        strengths = (
            "moe_z_loss_coeff",
            "moe_input_jitter_eps",
            "moe_router_bias_update_rate",
        )
        for name in strengths:
            if (getattr(self, name) or 0.0) < 0.0:
                found.append(violation(self, name, "not negative", f"set --{name.replace('_', '-')} to 0 or more"))
        if self.moe_router_topk_scaling_factor is not None and self.moe_router_topk_scaling_factor <= 0.0:
            why, remedy = "experts add to the stream", "set --moe-router-topk-scaling-factor above 0, or drop it"
            found.append(violation(self, "moe_router_topk_scaling_factor", why, remedy))
        if any(coefficient < 0.0 for coefficient in self.aux_loss_coefficients):
            found.append(violation(self, "moe_aux_loss_coeff", "not negative", "set --moe-aux-loss-coeff to 0 or more"))
        return found

    def _check_topk(self) -> list[Violation]:
        found = []
        topk, experts = self.moe_router_topk, self.num_moe_experts or 0
        if experts < 1:
            remedy = "set --num-experts to a positive number, or drop it for a dense model"
            found.append(violation(self, "num_moe_experts", "a MoE layer has at least one expert", remedy))
        elif not 1 <= topk <= experts:
            found.append(
                violation(
                    self,
                    "moe_router_topk num_moe_experts",
                    "a token chooses at least one expert and cannot choose one twice",
                    f"set --moe-router-topk to a number from 1 to {experts}, or raise --num-experts",
                )
            )
        is_softmax = self.moe_router_score_function == "softmax" and "sinkhorn" not in self.balancing_types
        if topk == 1 and is_softmax and not self.moe_router_pre_softmax:
            found.append(
                violation(
                    self,
                    "moe_router_topk moe_router_score_function moe_router_pre_softmax",
                    "softmax over a single chosen expert is always 1, so the router would get no gradient",
                    "add --moe-router-pre-softmax or choose --moe-router-score-function sigmoid",
                )
            )
        if self.moe_apply_probs_on_input and topk != 1:
            found.append(
                violation(
                    self,
                    "moe_apply_probs_on_input moe_router_topk",
                    "a probability on the input needs one expert per token",
                    "set --moe-router-topk 1 or drop --moe-apply-probs-on-input",
                )
            )
        return found

    def _check_groups(self) -> list[Violation]:
        found = []
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        names = "moe_router_group_topk moe_router_num_groups"
        if (groups is None) != (chosen is None):
            remedy = "set both --moe-router-num-groups and --moe-router-group-topk, or neither"
            found.append(violation(self, names, "group-limited routing needs both numbers", remedy))
        if groups is None or chosen is None:
            return found
        experts = self.num_moe_experts or 0
        if groups < 1 or experts % groups:
            remedy = "set --moe-router-num-groups to a divisor of --num-experts"
            found.append(violation(self, "moe_router_num_groups num_moe_experts", "groups have equal sizes", remedy))
        elif not 1 <= chosen <= groups:
            remedy = f"set --moe-router-group-topk to a number from 1 to {groups}"
            found.append(violation(self, names, "a token uses some of the groups", remedy))
        elif self.moe_router_topk > chosen * (experts // groups):
            remedy = "raise --moe-router-group-topk or lower --moe-router-topk"
            reason = f"the chosen groups hold {chosen * (experts // groups)} experts"
            found.append(violation(self, f"moe_router_topk {names} num_moe_experts", reason, remedy))
        elif self.moe_router_topk < chosen:
            remedy = "set --moe-router-topk to at least --moe-router-group-topk"
            reason = "a group's score is the sum of its best topk // group_topk experts, here none"
            found.append(violation(self, f"moe_router_topk {names}", reason, remedy))
        return found

    def _check_balancing(self) -> list[Violation]:
        found = []
        names = "moe_router_load_balancing_type moe_aux_loss_coeff"
        if len(self.balancing_types) != len(self.aux_loss_coefficients):
            remedy = "give --moe-aux-loss-coeff as many values as --moe-router-load-balancing-type"
            found.append(violation(self, names, "each balancing scheme has its own coefficient", remedy))
        if len(set(self.balancing_types)) != len(self.balancing_types):
            remedy = "name each scheme of --moe-router-load-balancing-type once"
            found.append(violation(self, "moe_router_load_balancing_type", "a scheme is listed twice", remedy))
        if "sinkhorn" in self.balancing_types and any(self.aux_loss_coefficients):
            remedy = "set --moe-aux-loss-coeff 0"
            found.append(violation(self, names, "sinkhorn balances by itself and has no auxiliary loss", remedy))
        if self.moe_router_enable_expert_bias and self.moe_router_score_function == "softmax":
            found.append(
                violation(
                    self,
                    "moe_router_enable_expert_bias moe_router_score_function",
                    "the expert bias is defined for scores of single experts",
                    "set --moe-router-score-function sigmoid or sqrtsoftplus, or drop --moe-router-enable-expert-bias",
                )
            )
        return found

    def _check_capacity(self) -> list[Violation]:
        found = []
        supported = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
        if self.moe_expert_capacity_factor is not None and not set(self.balancing_types) <= supported:
            remedy = "use aux_loss, seq_aux_loss, global_aux_loss or none, or drop --moe-expert-capacity-factor"
            names = "moe_expert_capacity_factor moe_router_load_balancing_type"
            found.append(violation(self, names, "this balancing scheme has no capacity", remedy))
        if self.moe_expert_capacity_factor == 0:
            remedy = "give a factor above 0, or drop --moe-expert-capacity-factor to keep every token"
            found.append(violation(self, "moe_expert_capacity_factor", "no expert has room for a token", remedy))
        if self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is None:
            remedy = "set --moe-expert-capacity-factor or drop --moe-pad-expert-input-to-capacity"
            names = "moe_pad_expert_input_to_capacity moe_expert_capacity_factor"
            found.append(violation(self, names, "there is no capacity to pad to", remedy))
        return found + self._check_row_budget()

    def _check_row_budget(self) -> list[Violation]:
        found = []
        name, factor = "moe_expert_rank_capacity_factor", self.moe_expert_rank_capacity_factor
        tiers = list(self.moe_rank_capacity_tiers)
        if factor is not None and factor <= 0:
            found.append(violation(self, name, "a budget holds rows", "set a factor above 0, for instance 1.2"))
        if factor is not None and self.moe_expert_capacity_factor is not None:
            remedy = "drop --moe-expert-capacity-factor or --moe-expert-rank-capacity-factor"
            reason = "a budget for ranks keeps every token, a capacity of experts drops some"
            found.append(violation(self, f"{name} moe_expert_capacity_factor", reason, remedy))
        if tiers and factor is None:
            remedy = "set --moe-expert-rank-capacity-factor or drop --moe-rank-capacity-tiers"
            found.append(violation(self, f"moe_rank_capacity_tiers {name}", "tiers follow a first budget", remedy))
        elif factor is not None and [factor, *tiers] != sorted({factor, *tiers}):
            remedy = "list rising factors above --moe-expert-rank-capacity-factor"
            found.append(violation(self, f"moe_rank_capacity_tiers {name}", "each tier has more room", remedy))
        return found
