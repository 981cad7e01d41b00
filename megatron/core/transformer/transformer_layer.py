"""One layer of the decoder, cut into the stages of `pipeline_parallel/overlap/protocol`.

    x ------------------------------+------------------------------------+
    |                               |                                    |
    input norm -> self attention -> + -> pre-MLP norm -> MLP or MoE ---> + -> output
    '---------------- pre_dispatch ---------------'   dispatch, experts,   post
                                                      combine

`forward` runs the stages in line, so that there is one implementation of a layer. A dense MLP runs in `post`.

Under sequence parallelism everything outside attention and MLP works on this rank's shard of the sequence.

Legend: s sequence (of this rank), b batch, h width, R rows at the experts of this rank.
"""

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_rope import RotaryTables
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.spec_utils import build_module, get_module
from megatron.core.pipeline_parallel.overlap.protocol import (
    DispatchInputs,
    ExchangingMLP,
    LayerCall,
    SavedInput,
    SavedRouting,
    Stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import random_region
from megatron.core.tensor_parallel.recompute import checkpoint, recomputed_on_use, recomputes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils.upcast import upcast


@dataclass(kw_only=True)
class TransformerLayerSubmodules:
    """Specs of the parts; the two `bda` entries end a residual branch (bias, dropout, add)."""

    input_layernorm: Any = IdentityOp
    self_attention: Any
    self_attn_bda: Any = get_bias_dropout_add
    pre_mlp_layernorm: Any = IdentityOp
    mlp: Any
    mlp_bda: Any = get_bias_dropout_add


class TransformerLayer(MegatronModule):
    """Attention and MLP with their norms and residuals.

    Args:
        layer_number: Global number of the layer, counted from 1.
        hidden_dropout: By default `config.hidden_dropout`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        self.input_layernorm = build_module(submodules.input_layernorm, **norm)
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=groups
        )
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
        self.mlp = _build_mlp(submodules.mlp, config, layer_number, groups)
        self.mlp_bda = build_module(submodules.mlp_bda)
        self.has_exchange = isinstance(self.mlp, ExchangingMLP)

    def saved_inputs(self) -> frozenset[SavedInput]:
        """Inputs of stages that autograd keeps; a dense MLP runs in `post` and keeps them, unless norms run again."""
        if self.has_exchange:
            return self.mlp.saved_inputs()
        is_made_again = recomputes(self.config, "layernorm") and not isinstance(self.pre_mlp_layernorm, IdentityOp)
        return frozenset() if is_made_again else frozenset({(Stage.POST, "rows")})

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: RotaryTables | torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        routing: SavedRouting | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Run the stages in line; the second result is the place of upstream's cross-attention context.

        `routing` is given if the whole layer is recomputed.

        Shapes: hidden_states [s, b, h], attention_mask bool broadcastable to [b, 1, s, s], True = masked,
            rotary_pos_emb tables or angles [s, 1, 1, d], padding_mask bool [b, s], True = padding -> [s, b, h].
        """
        if isinstance(rotary_pos_emb, torch.Tensor):
            rotary_pos_emb = RotaryTables.from_angles(rotary_pos_emb, self.config.params_dtype)
        call = LayerCall(attention_mask, rotary_pos_emb, padding_mask, routing)
        if self.has_exchange and recomputes(self.config, "moe"):
            return self._run_with_recomputed_moe(hidden_states, call), None
        rows, probs, residual, shared_output = self.pre_dispatch(hidden_states, call)
        if probs is not None:
            rows, probs = self.dispatch(rows, probs, call)
            rows = self.experts(rows, probs, call)
            rows = self.combine(rows, call)
        return self.post(rows, residual, shared_output, call), None

    def pre_dispatch(self, hidden_states: torch.Tensor, call: LayerCall) -> DispatchInputs:
        """Attention, pre-MLP norm and, with an exchange, everything up to it: [s, b, h] -> `DispatchInputs`."""
        normed, residual = self._attend(hidden_states, call)
        if not self.has_exchange:
            return DispatchInputs(normed, None, residual, None)
        with self._norm_on_use(self.pre_mlp_layernorm, residual, normed):
            rows, probs, shared_output, state = self.mlp.route_and_preprocess(normed, call.padding_mask, call.routing)
        call.dispatch_state = state
        return DispatchInputs(rows, probs, residual, shared_output)

    def dispatch(self, rows: torch.Tensor, probs: torch.Tensor, call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows [rows, h] and probabilities [rows] to their experts: [R, h], [R]. Communication only."""
        return self.mlp.dispatch(rows, probs, call.dispatch_state)

    def experts(self, rows: torch.Tensor, probs: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Run the experts of this rank: [R, h], [R] -> [R, h]."""
        return self.mlp.experts_compute(rows, probs, call.dispatch_state)

    def combine(self, rows: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Send rows [R, h] back: [rows, h]. Communication only."""
        return self.mlp.combine(rows, call.dispatch_state)

    def post(
        self, rows: torch.Tensor, residual: torch.Tensor, shared_output: torch.Tensor | None, call: LayerCall
    ) -> torch.Tensor:
        """Finish the MLP (a dense one runs here) and add the residual: [rows, h] or [s, b, h] -> [s, b, h]."""
        if self.has_exchange:
            output_with_bias = self.mlp.postprocess(rows, shared_output, call.dispatch_state), None
        else:
            with self._norm_on_use(self.pre_mlp_layernorm, residual, rows):
                output_with_bias = self._recomputed_mlp(rows) if recomputes(self.config, "mlp") else self.mlp(rows)
        return self._add(self.mlp_bda, output_with_bias, residual)

    def _attend(self, hidden_states: torch.Tensor, call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and pre-MLP norm: [s, b, h] -> the MLP's input [s, b, h], the residual stream [s, b, h]."""
        if self.config.fp32_residual_connection:
            hidden_states = upcast(hidden_states)
        normed, hidden_states = _norm_beside_stream(self.input_layernorm, hidden_states)
        with self._norm_on_use(self.input_layernorm, hidden_states, normed):
            attended, bias = self.self_attention(normed, call.attention_mask, call.rotary)
        is_sum = bias is None and not self._drops and self.self_attn_bda is get_bias_dropout_add
        if is_sum and _joins(self.pre_mlp_layernorm, attended, hidden_states):
            return self.pre_mlp_layernorm.with_stream(attended, hidden_states)
        residual = self._add(self.self_attn_bda, (attended, bias), hidden_states)
        return _norm_beside_stream(self.pre_mlp_layernorm, residual)

    def _run_with_recomputed_moe(self, hidden_states: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Run the stages in line, those of the MoE layer as one recomputed part: [s, b, h] -> [s, b, h]."""
        normed, residual = self._attend(hidden_states, call)
        routing = SavedRouting() if call.routing is None else call.routing

        def run_moe(normed: torch.Tensor) -> torch.Tensor:
            return self.mlp(normed, call.padding_mask, routing)[0]

        with self._norm_on_use(self.pre_mlp_layernorm, residual, normed):
            output = checkpoint(run_moe, normed, draws=self.config.draws_in_forward)
        return self._add(self.mlp_bda, (output, None), residual)

    def _recomputed_mlp(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the dense MLP as a recomputed part: [s, b, h] -> [s, b, h] and its bias [h] or None."""
        biases = []

        def run_mlp(normed: torch.Tensor) -> torch.Tensor:
            output, bias = self.mlp(normed)
            biases.append(bias)
            return output

        output = checkpoint(run_mlp, normed, draws=False)
        return output, biases.pop()

    def _norm_on_use(
        self, norm: torch.nn.Module, source: torch.Tensor, normed: torch.Tensor
    ) -> AbstractContextManager[None]:
        """Where norms are recomputed: keep no copy of `normed` [s, b, h], which is norm(source [s, b, h])."""
        is_active = recomputes(self.config, "layernorm") and not isinstance(norm, IdentityOp)
        return recomputed_on_use(normed, functools.partial(norm, source.detach()), is_active)

    @property
    def _drops(self) -> bool:
        return self.training and self.hidden_dropout > 0.0

    def _add(
        self, bda: Any, output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor
    ) -> torch.Tensor:
        """End a residual branch: output [s, b, h], bias [h], residual [s, b, h] -> [s, b, h]."""
        with random_region(self._drops and self.config.sequence_parallel):
            return bda(self.training, True)(output_with_bias, residual, self.hidden_dropout)


def _joins(norm: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> TypeGuard[WrappedTorchNorm]:
    """True if a kernel of `norm` also carries the residual stream on: x, residual [s, b, h]."""
    return isinstance(norm, WrappedTorchNorm) and norm.joins_stream(x, residual)


def _norm_beside_stream(norm: torch.nn.Module, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the residual stream [s, b, h], and the stream as it goes on beside it."""
    return norm.with_stream(stream) if _joins(norm, stream) else (norm(stream), stream)


def _build_mlp(spec: Any, config: TransformerConfig, layer_number: int, groups: ProcessGroupCollection) -> Any:
    """Build the MLP slot; a layer with experts takes all groups and its number, a dense one the TP group."""
    module = get_module(spec)
    if issubclass(module, ExchangingMLP):
        return build_module(spec, config=config, layer_number=layer_number, pg_collection=groups)
    return build_module(spec, config=config, tp_group=groups.tp)
