"""Self attention: QKV projection, per-head norm, rotary embedding, core attention, output projection.

The QKV matrix holds the heads group by group. With 4 query heads in 2 groups its rows are

    [ q0 q1 k0 v0 | q2 q3 k1 v1 ]        each entry kv_channels rows

so that a cut over tensor-parallel ranks keeps whole groups together: heads and groups are multiples of the ranks. Query
head i uses key and value head i // r.

Under sequence parallelism input and output are this rank's shard of the sequence; the heads see all of it.

Legend: s sequence, b batch, h width, n query heads and g groups (key and value heads) of this rank, r = n / g, d
channels of a head.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fusions.fused_qkv_heads import HeadNorms, fused_heads, has_heads_kernel
from megatron.core.fusions.fused_rope import RotaryTables, apply_rotary
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.parameter import hidden_init, output_init
from megatron.core.module_api.spec_utils import build_module
from megatron.core.param_attrs import sum_gradient_over_tp
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.recompute import checkpoint, recomputes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_size


@dataclass
class SelfAttentionSubmodules:
    """Specs of the parts; the two norms act on single heads."""

    linear_qkv: Any = ColumnParallelLinear
    core_attention: Any = DotProductAttention
    linear_proj: Any = RowParallelLinear
    q_layernorm: Any = IdentityOp
    k_layernorm: Any = IdentityOp


class SelfAttention(MegatronModule):
    """Attention of a sequence to itself.

    Args:
        layer_number: Global number of the layer, counted from 1.
        attn_mask_type: What core attention hides by itself.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        head = config.kv_channels
        tp_size = group_size(groups.tp)
        self.layer_number = layer_number
        self.hidden_size_per_attention_head = head
        self.num_query_groups_per_partition = divide(config.num_query_groups, tp_size)
        self.num_attention_heads_per_partition = divide(config.num_attention_heads, tp_size)
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            (config.num_attention_heads + 2 * config.num_query_groups) * head,
            config=config,
            init_method=hidden_init(config),
            bias=config.add_bias_linear or config.add_qkv_bias,
            gather_output=False,
            skip_bias_add=False,
            tp_group=groups.tp,
        )
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            pg_collection=groups,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            config.num_attention_heads * head,
            config.hidden_size,
            config=config,
            init_method=output_init(config),
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=groups.tp,
        )
        norm = {"config": config, "hidden_size": head, "eps": config.layernorm_epsilon}
        self.q_layernorm = build_module(submodules.q_layernorm, **norm)
        self.k_layernorm = build_module(submodules.k_layernorm, **norm)
        for head_norm in (self.q_layernorm, self.k_layernorm):
            for param in head_norm.parameters():
                sum_gradient_over_tp(param)  # a rank sees its own heads only

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: RotaryTables | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the projected output and the bias of the projection, which is not in it.

        Shapes: hidden_states [s, b, h], attention_mask bool broadcastable to [b, 1, s, s], True = masked,
            rotary_pos_emb tables or angles [s, 1, 1, d] -> [s, b, h], bias [h] or None.
        """
        query, key, value = self._rotated_heads(self._project(hidden_states), rotary_pos_emb)
        if recomputes(self.config, "core_attn"):
            attend = functools.partial(self.core_attention, attention_mask=attention_mask)
            return self.linear_proj(checkpoint(attend, query, key, value, draws=self.config.attention_dropout > 0.0))
        return self.linear_proj(self.core_attention(query, key, value, attention_mask))

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project and normalise: [s, b, h] -> query [s, b, n, d], key and value [s, b, g, d]."""
        return self._normed_heads(self._project(hidden_states))

    def _project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, g, r + 2, d]."""
        mixed, _ = self.linear_qkv(hidden_states)
        repeats = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        # [s, b, g * (r + 2) * d] -> [s, b, g, r + 2, d]
        return mixed.unflatten(
            -1, (self.num_query_groups_per_partition, repeats + 2, self.hidden_size_per_attention_head)
        )

    def _normed_heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split and normalise: [s, b, g, r + 2, d] -> query [s, b, n, d], key and value [s, b, g, d]."""
        query, key, value = mixed.split([mixed.shape[3] - 2, 1, 1], dim=3)
        query, key = self.q_layernorm(query.flatten(2, 3)), self.k_layernorm(key.squeeze(3))
        return query, key, value.squeeze(3)

    def _rotated_heads(
        self, mixed: torch.Tensor, rotary: RotaryTables | torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split, normalise and turn: mixed [s, b, g, r + 2, d], tables or angles [s, 1, 1, d] -> as `_normed_heads`."""
        if rotary is None:
            return self._normed_heads(mixed)
        tables = rotary if isinstance(rotary, RotaryTables) else RotaryTables.from_angles(rotary, mixed.dtype)
        interleaved, fuses = self.config.rotary_interleaved, self.config.apply_rope_fusion
        heads = self._heads_by_kernel(mixed, tables) if fuses else None
        if heads is not None:
            return heads
        query, key, value = self._normed_heads(mixed)
        query = apply_rotary(query, tables, interleaved, fuses)
        return query, apply_rotary(key, tables, interleaved, fuses), value

    def _heads_by_kernel(
        self, mixed: torch.Tensor, tables: RotaryTables
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What `_rotated_heads` returns, by one kernel; None if there is none for mixed [s, b, g, r + 2, d]."""
        query_norm, key_norm = self.q_layernorm, self.k_layernorm
        norms = None
        if isinstance(query_norm, WrappedTorchNorm) and isinstance(key_norm, WrappedTorchNorm):
            if query_norm.bias is not None:
                return None
            norms = HeadNorms(query_norm.weight, key_norm.weight, query_norm.eps, query_norm.zero_centered)
        elif not (isinstance(query_norm, IdentityOp) and isinstance(key_norm, IdentityOp)):
            return None
        if not has_heads_kernel(mixed, norms, tables):
            return None
        return fused_heads(mixed, norms, tables, self.config.rotary_interleaved)
