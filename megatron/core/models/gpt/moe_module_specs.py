"""The MLP slot of a MoE layer."""

from megatron.core.models.backends import BackendSpecProvider, get_backend
from megatron.core.module_api.spec_utils import ModuleSpec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP


def get_moe_module_spec(backend: BackendSpecProvider | None = None, moe_grouped_gemm: bool = False) -> ModuleSpec:
    """Return the spec of a MoE layer of the backend's parts, with grouped experts or with experts in sequence."""
    backend = get_backend() if backend is None else backend
    dense = MLPSubmodules(backend.column_parallel_linear(), backend.row_parallel_linear())
    grouped = backend.grouped_linear()
    if moe_grouped_gemm:
        parts = None if grouped is None else MLPSubmodules(grouped, grouped)
        experts = ModuleSpec(GroupedMLP, submodules=parts)
    else:
        experts = ModuleSpec(SequentialMLP, submodules=dense)
    shared = ModuleSpec(SharedExpertMLP, submodules=dense)
    return ModuleSpec(MoELayer, submodules=MoESubmodules(experts, shared, grouped is not None))
