"""Building blocks of the training tree, under the import names that Megatron-LM users know.

Importing this package has no side effects and needs neither CUDA nor any optional package: the names below are loaded
when they are first asked for, so that `from megatron.core import parallel_state` costs only what it names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.configs.parallel import ModelParallelConfig
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.timers import Timers

__all__ = [
    "DistributedDataParallel",
    "ModelParallelConfig",
    "ProcessGroupCollection",
    "Timers",
    "parallel_state",
    "tensor_parallel",
]

_MODULES = frozenset({"parallel_state", "tensor_parallel"})
_ATTRIBUTES = {
    "DistributedDataParallel": "megatron.core.distributed",
    "ModelParallelConfig": "megatron.core.model_parallel_config",
    "ProcessGroupCollection": "megatron.core.process_groups_config",
    "Timers": "megatron.core.timers",
}


def __getattr__(name: str) -> Any:
    """Import the module behind a public name on first use (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(f"megatron.core.{name}")
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(_ATTRIBUTES[name]), name)
    raise AttributeError(f"module 'megatron.core' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
