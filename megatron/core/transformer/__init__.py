"""Layers of the decoder and what they are made of (layer L6)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.configs.transformer import TransformerConfig
    from megatron.core.module_api.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

__all__ = [
    "MegatronModule",
    "ModuleSpec",
    "TransformerBlock",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "build_module",
]

_HOMES = {
    "MegatronModule": "module",
    "ModuleSpec": "spec_utils",
    "TransformerBlock": "transformer_block",
    "TransformerBlockSubmodules": "transformer_block",
    "TransformerConfig": "transformer_config",
    "TransformerLayer": "transformer_layer",
    "TransformerLayerSubmodules": "transformer_layer",
    "build_module": "spec_utils",
}


def __getattr__(name: str) -> Any:
    """Import the module behind a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
