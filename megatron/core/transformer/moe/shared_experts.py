"""Shared experts: one dense MLP that every token passes, beside its routed experts.

    out = mlp(h) * sigmoid(h w)        the factor only with `moe_shared_expert_gate`, w [1, h]

All shared experts together are one MLP of width `moe_shared_expert_intermediate_size`, without bias. Its weights are
dense parameters, sharded over TP like any MLP's.

Legend: s sequence, b batch, h width.
"""

import copy

import torch
import torch.nn.functional as F

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.module_api.parameter import hidden_init, new_parameter
from megatron.core.param_attrs import ParamAttrs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.recompute import checkpoint, recomputes
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.utils.upcast import upcast


class SharedExpertMLP(MLP):
    """The shared experts of a layer, with an optional gate."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        gate: bool | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Build the MLP; `gate` overrides `config.moe_shared_expert_gate`."""
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        super().__init__(
            without_bias(config),
            MLPSubmodules() if submodules is None else submodules,
            ffn_hidden_size=config.moe_shared_expert_intermediate_size,
            tp_group=groups.tp,
        )
        self.gate_weight: torch.nn.Parameter | None = None
        if config.moe_shared_expert_gate if gate is None else gate:
            attrs = ParamAttrs(hidden_init(config), sequence_parallel=config.sequence_parallel)
            self.gate_weight = new_parameter(config, (1, config.hidden_size), attrs)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Run all tokens: [s, b, h] -> [s, b, h]."""
        if recomputes(self.config, "shared_experts"):
            # two inputs, so that their gradients are added one by one, as without recompute
            return checkpoint(self._run, hidden_states, hidden_states, draws=False)
        return self._run(hidden_states, hidden_states)

    def _run(self, gate_input: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """MLP and gate, which see the same tokens: [s, b, h], [s, b, h] -> [s, b, h]."""
        output, _ = super().forward(hidden_states)
        if self.gate_weight is None:
            return output
        factor = torch.sigmoid(upcast(F.linear(gate_input, self.gate_weight)))  # [s, b, 1]
        return (output * factor).to(output.dtype)


def without_bias(config: TransformerConfig) -> TransformerConfig:
    """The same configuration with bias-free linear layers."""
    if not config.add_bias_linear:
        return config
    bias_free = copy.copy(config)
    bias_free.add_bias_linear = False
    return bias_free
