"""The MLP slot of a MoE layer."""

from megatron.core.module_api.spec_utils import ModuleSpec
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules


def get_moe_module_spec(moe_grouped_gemm: bool | None = None) -> ModuleSpec:
    """Return the spec of a MoE layer.

    `moe_grouped_gemm` chooses between grouped and sequential experts; None leaves it to the configuration, as router
    and shared experts are.
    """
    if moe_grouped_gemm is None:
        return ModuleSpec(MoELayer, submodules=MoESubmodules())
    return ModuleSpec(MoELayer, submodules=MoESubmodules(GroupedMLP if moe_grouped_gemm else SequentialMLP))
