"""The experts of a rank as two grouped products.

    rows [R, h] -> fc1 of each expert -> act(.) * p -> fc2 of each expert -> [R, h]

Each expert keeps parameters of its own: `linear_fc1.weight0 ... weight{n-1}`, so that names, gradients, main gradients
and checkpoint entries are per expert, and the same as with sequential experts. To hand them to one grouped kernel
without a copy they are allocated as the slices of one [n, out, in] storage, and packed again when the module moves to
another device or dtype. Whoever rebinds a parameter's data (a flat parameter buffer) keeps this property by laying
the experts out at equal distances; else the kernel's operand is copied together in each pass, with the same result.

Expert tensor parallelism cuts fc1 along its output and fc2 along its input. The module then computes a summand of the
result and communicates nothing: the dispatcher brings every row to all shards of its expert and adds their results.

Legend: R rows sorted by expert, h width, f inner width of this rank, n experts of this rank, e global expert id.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fp8.experts import Fp8GroupedWeights, fp8_swiglu_experts
from megatron.core.fp8.layer_state import build_fp8_state, expert_row_multiple
from megatron.core.fp8.linear import fp8_grouped_linear
from megatron.core.fp8.padding import RowPadding, plan_padding
from megatron.core.fusions.fused_grouped_linear import expert_of_row, gather_bias, grouped_linear
from megatron.core.fusions.fused_weighted_activation import weighted_activation
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.parameter import hidden_init, new_parameter, output_init
from megatron.core.param_attrs import InitSpec, ParamAttrs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.recompute import recomputed_on_use, recomputes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.expert_names import ExpertNumbering, is_reduced_like_dense
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_rank, group_size
from megatron.core.utils.stacked import pack


class GroupedLinear(MegatronModule):
    """n linear layers of one shape; expert i has `weight{i}` [out, in] and, with a bias, `bias{i}` [out].

    Args:
        num_experts: n.
        in_features: Width of a row.
        out_features: Width of a result row.
        weight_attrs: Attributes of each weight.
        has_bias: Whether the experts have biases, which start at zero.
        allreduce: False if gradients are reduced over the expert groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        weight_attrs: ParamAttrs,
        has_bias: bool,
        allreduce: bool,
    ) -> None:
        super().__init__(config)
        self.num_experts, self.has_bias = num_experts, has_bias
        bias_attrs = ParamAttrs(InitSpec("zeros"), is_expert=True)  # experts with biases are not split over ETP
        for i in range(num_experts):
            weight = new_parameter(config, (out_features, in_features), weight_attrs, allreduce=allreduce)
            self.register_parameter(f"weight{i}", weight)
            bias = new_parameter(config, (out_features,), bias_attrs, allreduce=allreduce) if has_bias else None
            self.register_parameter(f"bias{i}", bias)
        pack(self.weights)
        self.fp8 = build_fp8_state(config)

    needs_host_counts = False
    """A forward waits for the host to read how many rows each expert has."""

    @property
    def saves_rows(self) -> bool:
        """Whether autograd keeps the rows that are given: not where it keeps FP8 codes of them."""
        return self.fp8 is None or not self.fp8.setup.quantizes_wgrad

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """N parameters [out, in]."""
        return [self._parameters[f"weight{i}"] for i in range(self.num_experts)]  # type: ignore[misc]

    @property
    def biases(self) -> list[torch.nn.Parameter]:
        """N parameters [out]; only with a bias."""
        return [self._parameters[f"bias{i}"] for i in range(self.num_experts)]  # type: ignore[misc]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "GroupedLinear":
        """Move or convert the parameters, then pack them again: each was given a storage of its own."""
        super()._apply(fn, recurse)
        pack(self.weights)
        return self

    def forward(
        self,
        rows: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        host_counts: list[int] | None = None,
        *,
        is_lent: bool = False,
    ) -> torch.Tensor | Fp8GroupedWeights:
        """Multiply each group of rows by its expert's matrix, no bias: [R, in], int [n] -> [R, out].

        With `is_lent` the FP8 weights are returned, for a step that runs several products at once: it comes through
        here so that whoever waits for a forward, to complete the parameters first, is asked.
        """
        fuses_wgrad = self.config.gradient_accumulation_fusion
        if is_lent:
            assert self.fp8 is not None, "weights lent without FP8"
            return Fp8GroupedWeights(self.weights, self.fp8, fuses_wgrad)
        if self.fp8 is not None:
            ends = tokens_per_expert.to(rows.device).cumsum(0, dtype=torch.int32)
            return fp8_grouped_linear(rows, self.weights, ends, self.fp8, fuses_wgrad)
        return grouped_linear(rows, self.weights, tokens_per_expert, host_counts, fuses_wgrad)


class GroupedMLP(ExpertNumbering, MegatronModule):
    """All experts of this rank at once."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Build the experts of this rank; `submodules` are the classes of the two products, by default ours."""
        super().__init__(config)
        self.given_row_multiple = 1
        """The rows of each expert are given as a multiple of this; set by who owns the dispatcher."""
        linears = MLPSubmodules(GroupedLinear, GroupedLinear) if submodules is None else submodules
        groups = self.number_experts(num_local_experts, pg_collection)
        width = config.moe_ffn_hidden_size
        assert width is not None, "moe_ffn_hidden_size=None: experts need a width"
        parts = 2 if config.gated_linear_unit else 1
        full, width = width, divide(width, group_size(groups.expt_tp))
        place = {"partition_rank": group_rank(groups.expt_tp), "is_expert": True}
        fc1_shape, fc2_shape = (parts * full, config.hidden_size), (config.hidden_size, full)
        fc1 = ParamAttrs(hidden_init(config), partition_dim=0, num_parts=parts, full_shape=fc1_shape, **place)
        fc2 = ParamAttrs(output_init(config), partition_dim=1, full_shape=fc2_shape, **place)
        has_bias, allreduce = config.add_bias_linear, is_reduced_like_dense(groups)
        self.linear_fc1 = linears.linear_fc1(
            config,
            num_local_experts,
            config.hidden_size,
            parts * width,
            weight_attrs=fc1,
            has_bias=has_bias,
            allreduce=allreduce,
        )
        self.linear_fc2 = linears.linear_fc2(
            config,
            num_local_experts,
            width,
            config.hidden_size,
            weight_attrs=fc2,
            has_bias=has_bias,
            allreduce=allreduce,
        )

    def graph_capture_blockers(self) -> list[str]:
        """Why a step with these experts cannot be captured."""
        config, dtype = self.config, self.linear_fc1.weights[0].dtype
        if config.moe_pad_expert_input_to_capacity:
            return []
        if self.linear_fc1.needs_host_counts:
            return [
                "cuda_graph_impl='full_iteration' with transformer_impl='transformer_engine': its experts need their "
                "row counts on the host; pad them with --moe-pad-expert-input-to-capacity, or use --transformer-impl "
                "local."
            ]
        if dtype == torch.bfloat16:
            return []
        return [
            f"cuda_graph_impl='full_iteration' with params_dtype={dtype}: the grouped kernel that reads row counts on "
            "the device is for bf16; add --bf16, or pad experts with --moe-pad-expert-input-to-capacity."
        ]

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        host_tokens_per_expert: list[int] | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Run every row through its expert: rows [R, h], tokens_per_expert int [n], probs [R] -> [R, h].

        Host:   no wait if the grouped kernel runs or the counts are given on the host, else one.
        Memory: keeps the rows, the result of fc1, the weighted activation and the probabilities for backward; in FP8
                codes in place of the rows and the activation.
        """
        rows, probs = permuted_local_hidden_states, permuted_probs
        padding = self._padding(tokens_per_expert, rows)
        if padding is not None:
            rows, probs = padding.pad(rows), padding.pad(probs)
            tokens_per_expert = padding.tokens_per_expert
            host_tokens_per_expert = self._padded(host_tokens_per_expert)
        inner_probs: torch.Tensor | None = probs
        if self.config.moe_apply_probs_on_input:
            rows, inner_probs = (rows * probs.unsqueeze(-1)).to(rows.dtype), None
        experts = expert_of_row(tokens_per_expert.to(rows.device), rows.shape[0]) if self.linear_fc1.has_bias else None
        if self._is_one_fp8_step:
            ends = tokens_per_expert.to(rows.device).cumsum(0, dtype=torch.int32)
            fc1, fc2 = (linear(rows, tokens_per_expert, is_lent=True) for linear in (self.linear_fc1, self.linear_fc2))
            output = fp8_swiglu_experts(rows, inner_probs, ends, fc1, fc2)
            return (output if padding is None else padding.unpad(output)), None
        inner = self.linear_fc1(rows, tokens_per_expert, host_tokens_per_expert)
        if experts is not None:
            inner = (inner + gather_bias(self.linear_fc1.biases, experts)).to(inner.dtype)
        inner, uses = activate_experts(self.config, inner, inner_probs)
        with uses:
            output = self.linear_fc2(inner, tokens_per_expert, host_tokens_per_expert)
        if experts is not None:
            output = add_weighted_bias(output, gather_bias(self.linear_fc2.biases, experts), inner_probs)
        return (output if padding is None else padding.unpad(output)), None

    @property
    def _is_one_fp8_step(self) -> bool:
        """True if the two products and SwiGLU between them run as one step: FP8 throughout, ours, no bias between."""
        config, linear = self.config, self.linear_fc1
        has_swiglu = config.gated_linear_unit and config.activation_func is F.silu and config.bias_swiglu_fusion
        is_ours = isinstance(linear, GroupedLinear) and isinstance(self.linear_fc2, GroupedLinear)
        return is_ours and has_swiglu and not linear.has_bias and linear.fp8 is not None and not linear.saves_rows

    @property
    def saves_rows(self) -> bool:
        """Whether autograd keeps the rows that are given: not where it keeps FP8 codes or a padded copy of them."""
        if self.linear_fc1.fp8 is None:
            return True
        return not self._pads and (self.config.moe_apply_probs_on_input or self.linear_fc1.saves_rows)

    @property
    def saves_probs(self) -> bool:
        """Whether autograd keeps the probabilities that are given: not where it keeps a padded copy of them."""
        return not self._pads

    @property
    def _pads(self) -> bool:
        """True if FP8 needs more rows than are given."""
        return self.given_row_multiple % expert_row_multiple(self.config) != 0

    def _padding(self, tokens_per_expert: torch.Tensor, rows: torch.Tensor) -> RowPadding | None:
        """Padding that FP8 needs around tokens_per_expert int [n] and rows [R, h]; None if it needs none."""
        if not self._pads:
            return None
        return plan_padding(tokens_per_expert.to(rows.device), rows.shape[0], expert_row_multiple(self.config))

    def _padded(self, host_counts: list[int] | None) -> list[int] | None:
        """Counts with the rows that FP8 adds, for products that need them on the host."""
        if host_counts is None or not self.linear_fc1.needs_host_counts:
            return None
        multiple = expert_row_multiple(self.config)
        return [-(-count // multiple) * multiple for count in host_counts]


def activate_experts(
    config: TransformerConfig, inner: torch.Tensor, probs: torch.Tensor | None
) -> tuple[torch.Tensor, AbstractContextManager[None]]:
    """Weighted activation, inner [R, f or 2f], probs [R] -> [R, f], and the context in which fc2 is to use it.

    With recompute of `moe_act` the context keeps fc2 from holding a copy until backward.
    """
    activate = functools.partial(
        weighted_activation,
        activation=config.activation_func,
        is_gated=config.gated_linear_unit,
        fuses=config.bias_swiglu_fusion,
    )
    result = activate(inner, probs)
    again = functools.partial(activate, inner.detach(), None if probs is None else probs.detach())
    return result, recomputed_on_use(result, again, recomputes(config, "moe_act"))


def add_weighted_bias(output: torch.Tensor, bias: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    """Add bias * p: output [R, h], bias [R, h] or [h], probs [R] or None for 1 -> [R, h] in the dtype of the output."""
    if probs is None:
        return (output + bias).to(output.dtype)
    return (output + bias * probs.unsqueeze(-1)).to(output.dtype)
