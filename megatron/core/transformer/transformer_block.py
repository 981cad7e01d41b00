"""The stack of decoder layers that one model chunk holds.

The final norm belongs to the chunk's post-process, whatever kind the last layer is: `run_layers` and `final_norm` are
separate steps of `forward`, so that a schedule that runs layers stage by stage ends with the same norm.

Legend: s sequence, b batch, h width, d turned channels.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fp8.layer_choice import config_of_layer
from megatron.core.fusions.fused_rope import RotaryTables
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.spec_utils import ModuleSpec, build_module
from megatron.core.pipeline_parallel.overlap.protocol import SavedRouting
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.recompute import checkpoint, layer_spans
from megatron.core.transformer.layer_layout import chunk_layers
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass
class TransformerBlockSubmodules:
    """Specs of the layers, first to last, and of the norm after them."""

    layer_specs: list[ModuleSpec] = field(default_factory=list)
    layer_norm: Any = WrappedTorchNorm


class TransformerBlock(MegatronModule):
    """Decoder layers and the final norm.

    Args:
        spec: Specs of all layers of the model, or of one layer that is repeated `config.num_layers` times; the block
            builds those of its chunk.
        post_layer_norm: The block ends with a norm.
        pre_process: The chunk begins with the embedding; otherwise `set_input_tensor` provides the input.
        post_process: The chunk ends with the output layer, so that the final norm is here.
        vp_stage: Number of the chunk on a rank that holds several.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        submodules = _block_submodules(config, spec)
        self.pre_process, self.post_process = pre_process, post_process
        self.input_tensor: torch.Tensor | None = None
        self.share_over = groups.tp if config.distribute_saved_activations else None
        self.layers = torch.nn.ModuleList(
            build_module(
                submodules.layer_specs[layer],
                config=config_of_layer(config, layer + 1),
                layer_number=layer + 1,
                pg_collection=groups,
            )
            for layer in chunk_layers(config, groups.pp, vp_stage)
        )
        self.final_layernorm: torch.nn.Module | None = None
        if post_process and post_layer_norm and submodules.layer_norm is not None:
            self.final_layernorm = build_module(
                submodules.layer_norm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """Provide the hidden states [s, b, h] that a chunk without embedding starts from."""
        self.input_tensor = input_tensor

    def global_name(self, local_name: str) -> str:
        """Name layers by their global number, counted from 0."""
        if not local_name.startswith("layers."):
            return local_name
        _, index, rest = local_name.split(".", 2)
        layer = self.layers[int(index)]
        assert isinstance(layer, TransformerLayer), f"layers.{index} is a {type(layer).__name__}, it has no number"
        return f"layers.{layer.layer_number - 1}.{rest}"

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: RotaryTables | torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers and, at the end of the model, the final norm.

        Shapes: hidden_states [s, b, h] (ignored without `pre_process`), attention_mask bool broadcastable to
            [b, 1, s, s], True = masked, rotary_pos_emb tables or angles [s, 1, 1, d], padding_mask bool [b, s],
            True = padding -> [s, b, h].
        """
        if not self.pre_process:
            hidden_states = self.input_tensor
        assert hidden_states is not None, "hidden_states=None: a chunk without embedding needs set_input_tensor first"
        if isinstance(rotary_pos_emb, torch.Tensor):
            rotary_pos_emb = RotaryTables.from_angles(rotary_pos_emb, self.config.params_dtype)
        return self.final_norm(self.run_layers(hidden_states, attention_mask, rotary_pos_emb, padding_mask))

    def run_layers(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary: RotaryTables | None,
        padding_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the layers in order, under full recompute in spans: [s, b, h] -> [s, b, h]."""
        for span, is_recomputed in layer_spans(self.config, len(self.layers)):
            routings = [SavedRouting() if is_recomputed else None for _ in span]
            shared = {"attention_mask": attention_mask, "rotary_pos_emb": rotary, "padding_mask": padding_mask}
            run = functools.partial(self._run_span, span, routings, shared)
            if is_recomputed and self.training:
                draws = self.config.draws_in_forward
                hidden_states = checkpoint(run, hidden_states, draws=draws, share_over=self.share_over)
            else:
                hidden_states = run(hidden_states)
        return hidden_states

    def recomputed_layers(self) -> frozenset[int]:
        """Positions of the layers that full recompute runs again, for a schedule that runs layers one by one."""
        spans = layer_spans(self.config, len(self.layers)) if self.training else []
        return frozenset(position for span, is_recomputed in spans if is_recomputed for position in span)

    def _run_span(
        self, span: range, routings: list[SavedRouting | None], shared: dict[str, Any], hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Run the layers of one span, `shared` being the arguments that all take: [s, b, h] -> [s, b, h]."""
        for position, routing in zip(span, routings, strict=True):
            hidden_states, _ = self.layers[position](hidden_states, **shared, routing=routing)
        return hidden_states

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise if this chunk ends the model: [s, b, h] -> [s, b, h]."""
        return hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)


def _block_submodules(
    config: TransformerConfig, spec: TransformerBlockSubmodules | ModuleSpec
) -> TransformerBlockSubmodules:
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    if isinstance(spec.submodules, TransformerBlockSubmodules):
        return spec.submodules
    return TransformerBlockSubmodules([spec] * config.num_layers)
