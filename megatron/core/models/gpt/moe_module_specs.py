"""The MLP slot of a MoE layer."""

from megatron.core.module_api.spec_utils import ModuleSpec


def get_moe_module_spec() -> ModuleSpec:
    """Return the spec of a MoE layer; router, experts and shared experts follow from the configuration."""
    return ModuleSpec(module=("megatron.core.transformer.moe.moe_layer", "MoELayer"))
