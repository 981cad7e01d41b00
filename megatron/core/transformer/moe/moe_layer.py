"""The MoE layer: router, dispatcher, experts and shared experts, cut into the stages that a schedule runs.

    1. route_and_preprocess   router, shared experts, rows ordered by destination    compute
    2. dispatch               rows to the ranks of their experts                     communication only
    3. experts_compute        order by expert, experts, order of arrival             compute
    4. combine                rows back                                              communication only
    5. postprocess            rows of each token added up, shared experts added      compute

`forward` is these five in line. Tensors with gradient are passed explicitly; everything else of a microbatch is in the
`DispatchState`, so that several microbatches can be in the layer at once.

Legend: s sequence of this rank, b batch, h width, T = s * b tokens, S rows sent, R rows at the experts of this rank.
"""

import dataclasses
from typing import Any

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fp8.layer_choice import config_of_experts
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.spec_utils import build_module
from megatron.core.pipeline_parallel.overlap.protocol import SavedInput, SavedRouting, Stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import own_rows
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import DispatchState, build_dispatcher


@dataclasses.dataclass
class MoESubmodules:
    """Specs of the parts; None takes the one that the configuration asks for."""

    experts: Any = None
    """Routed experts: `GroupedMLP`, `SequentialMLP` or a spec of a module with their interface."""

    shared_experts: Any = None
    """Shared experts, built only if the configuration has any."""

    has_own_recipes: bool = False
    """The experts are another library's, which has kernels for every FP8 recipe that it offers."""


class MoELayer(MegatronModule):
    """A layer's MLP made of experts.

    Args:
        config: Configuration of the model.
        submodules: Specs of the parts.
        layer_number: Global number of the layer, counted from 1; it labels metrics.
        pg_collection: Process groups; None takes those of `parallel_state`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        specs = MoESubmodules() if submodules is None else submodules
        self.layer_number = layer_number
        self.sequence_group = groups.tp if config.sequence_parallel else None
        self.router = TopKRouter(config, pg_collection=groups, layer_number=layer_number)
        expert_config = config if specs.has_own_recipes else config_of_experts(config)
        self.token_dispatcher = build_dispatcher(expert_config, groups)
        experts = specs.experts or (GroupedMLP if config.moe_grouped_gemm else SequentialMLP)
        num_local_experts = self.token_dispatcher.num_local_experts
        self.experts = build_module(experts, num_local_experts, expert_config, pg_collection=groups)
        self.experts.given_row_multiple = self.token_dispatcher.row_multiple
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = build_module(specs.shared_experts or SharedExpertMLP, config, pg_collection=groups)

    def saved_inputs(self) -> frozenset[SavedInput]:
        """Inputs that autograd keeps: the experts', if they are given what arrived itself and no copy in their order.

        Experts that save something else (quantised or padded copies) say so by attributes `saves_rows` and
        `saves_probs` that are False.
        """
        if not self.token_dispatcher.traits.postprocess_aliases_input:
            return frozenset()
        kept = [name for name in ("rows", "probs") if getattr(self.experts, f"saves_{name}", True)]
        return frozenset((Stage.EXPERTS, name) for name in kept)

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        routing: SavedRouting | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Run the layer: hidden [s, b, h], padding mask bool [b, s] (True = padding) -> [s, b, h] and no bias.

        Under sequence parallelism hidden is this rank's shard of the sequence and the mask that of the whole sequence.
        """
        rows, probs, shared_output, state = self.route_and_preprocess(hidden_states, padding_mask, routing)
        rows, probs = self.dispatch(rows, probs, state)
        rows = self.experts_compute(rows, probs, state)
        rows = self.combine(rows, state)
        return self.postprocess(rows, shared_output, state), None

    def graph_capture_blockers(self) -> list[str]:
        """Why a step with this layer cannot be captured, each as `field=value: reason; remedy`."""
        traits = self.token_dispatcher.traits
        if traits.host_sync_free and traits.static_shapes:
            return []
        return [
            f"cuda_graph_impl='full_iteration' with moe_token_dispatcher_type="
            f"{self.config.moe_token_dispatcher_type!r}: the host reads how many rows go where, and their number "
            "changes; set --moe-expert-rank-capacity-factor (no token is lost), or --moe-expert-capacity-factor with "
            "--moe-pad-expert-input-to-capacity, or run with --cuda-graph-impl none."
        ]

    def route_and_preprocess(
        self,
        hidden: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        routing: SavedRouting | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, DispatchState]:
        """Step 1: [s, b, h], mask bool [b, s] -> rows [S, h], probs [S], shared output [s, b, h] or None, state."""
        mask = None
        if padding_mask is not None:
            mask = own_rows(padding_mask.transpose(0, 1).bool().contiguous(), self.sequence_group)
        probs, routing_map = self.router(hidden, mask, routing)
        shared_output = None if self.shared_experts is None else self.shared_experts(hidden)
        tokens = hidden.reshape(-1, hidden.shape[-1])  # [s, b, h] -> [T, h]
        rows, row_probs, state = self.token_dispatcher.dispatch_preprocess(tokens, routing_map, probs)
        state.output_shape = hidden.shape
        return rows, row_probs, shared_output, state

    def dispatch(
        self, rows: torch.Tensor, probs: torch.Tensor, state: DispatchState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Step 2: rows [S, h], probs [S] -> what arrived at this rank."""
        return self.token_dispatcher.token_dispatch(rows, probs, state)

    def experts_compute(self, rows: torch.Tensor, probs: torch.Tensor, state: DispatchState) -> torch.Tensor:
        """Step 3: arrived rows and probabilities -> expert output in the order of arrival, [R, h] in between."""
        rows, tokens_per_expert, probs = self.token_dispatcher.dispatch_postprocess(rows, probs, state)
        output, _ = self.experts(rows, tokens_per_expert, probs, state.host_tokens_per_expert)
        return self.token_dispatcher.combine_preprocess(output, state)

    def combine(self, rows: torch.Tensor, state: DispatchState) -> torch.Tensor:
        """Step 4: expert output -> rows [S, h] on the ranks they came from."""
        return self.token_dispatcher.token_combine(rows, state)

    def postprocess(self, rows: torch.Tensor, shared_output: torch.Tensor | None, state: DispatchState) -> torch.Tensor:
        """Step 5: rows [S, h], shared output [s, b, h] -> [s, b, h]."""
        assert state.output_shape is not None, "postprocess before route_and_preprocess"
        output = self.token_dispatcher.combine_postprocess(rows, state).view(state.output_shape)
        return output if shared_output is None else output + shared_output
