"""The MLP of a layer: fc1, activation, fc2.

    y = fc2(act(x A1 + b1)) + b2              gated: act(gate) * up, [gate; up] = x A1 + b1

Legend: s sequence, b batch, h width, f inner width, T tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from megatron.core.fusions.fused_bias_glu import bias_glu
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.parameter import hidden_init, output_init
from megatron.core.module_api.spec_utils import build_module
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


@dataclass
class MLPSubmodules:
    """Specs of the two linear layers."""

    linear_fc1: Any = ColumnParallelLinear
    linear_fc2: Any = RowParallelLinear


class MLP(MegatronModule):
    """Two linear layers around an activation; also the form of a sequential expert and of the shared experts.

    Args:
        is_expert: The weights belong to a routed expert and `tp_group` is the expert tensor-parallel group.
        input_size: Width of the input, by default `hidden_size`.
        ffn_hidden_size: Inner width, by default `config.ffn_hidden_size`.
        tp_group: Ranks that share the matrices; None for this rank alone.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config)
        width = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        parts = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            config.hidden_size if input_size is None else input_size,
            parts * width,
            config=config,
            init_method=hidden_init(config),
            bias=config.add_bias_linear,
            gather_output=False,
            stride=parts,
            skip_bias_add=True,
            is_expert=is_expert,
            tp_group=tp_group,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            width,
            config.hidden_size,
            config=config,
            init_method=output_init(config),
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=is_expert,
            tp_group=tp_group,
        )

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output without the bias of fc2, and that bias for a later fused add.

        With `per_token_scale` [T] (routing probabilities) the inner activation and the bias are scaled per token, and
        the bias is part of the output. Shapes: hidden_states [s, b, h] or [T, h] -> the same, bias [h] or None.
        """
        inner, bias = self.linear_fc1(hidden_states)
        inner = self.activate(inner, bias)
        if per_token_scale is None:
            return self.linear_fc2(inner)
        scale = per_token_scale.unsqueeze(-1)
        output, output_bias = self.linear_fc2((inner * scale).to(inner.dtype))
        if output_bias is not None:
            output = output + (output_bias * scale).to(output.dtype)
        return output, None

    def activate(self, inner: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Add the bias and apply the configured activation: [..., f or 2f], bias [f or 2f] -> [..., f]."""
        activation = self.config.activation_func
        if self.config.gated_linear_unit:
            return bias_glu(inner, bias, activation, self.config.bias_swiglu_fusion)
        if bias is None:
            return activation(inner)
        if activation is F.gelu and self.config.bias_activation_fusion:
            return bias_gelu(inner, bias)
        return activation(inner + bias)
