"""Layers cut over tensor-parallel ranks, their loss, and the random states of parallel regions (layer L4).

The names of Megatron users are loaded when they are asked for: the layers need `core/module_api`, which in turn needs
`tensor_parallel/random`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "vocab_parallel_cross_entropy",
]

_HOMES = {
    "ColumnParallelLinear": "layers",
    "RowParallelLinear": "layers",
    "VocabParallelEmbedding": "layers",
    "get_cuda_rng_tracker": "random",
    "model_parallel_cuda_manual_seed": "random",
    "vocab_parallel_cross_entropy": "cross_entropy",
}


def __getattr__(name: str) -> Any:
    """Import the module behind a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
