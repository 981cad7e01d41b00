"""How the layers of this package split a size over the ranks of their group."""

import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.utils.groups import group_size


def require_single_rank(group: dist.ProcessGroup | None, layer: str) -> None:
    """Refuse a tensor-parallel group of more than one rank: the layers hold their shards but do not communicate."""
    size = group_size(group)
    if size > 1:
        raise ConfigError(
            f"tensor_model_parallel_size={size}: {layer} does not exchange shards between ranks; "
            "set --tensor-model-parallel-size 1 (and --expert-tensor-parallel-size 1)."
        )
