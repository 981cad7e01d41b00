"""The layers of one model chunk: what `core/pipeline_layout` deals out, for the rank of a process group."""

import torch.distributed as dist

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.pipeline_layout import stage_layers
from megatron.core.utils.groups import group_rank, group_size


def chunk_layers(
    config: TransformerConfig, pp_group: dist.ProcessGroup | None = None, vp_stage: int | None = None
) -> range:
    """Return the global layers, counted from 0, of chunk `vp_stage` (None: the only one) of this rank.

    Without pipeline groups a model is whole, whatever the configuration says.
    """
    if group_size(pp_group) == 1:
        return range(config.num_layers)
    return stage_layers(config)[(vp_stage or 0) * group_size(pp_group) + group_rank(pp_group)]
