"""Word embedding whose rows are split over the tensor-parallel ranks.

Legend: b batch, s sequence, h width, v rows of the table (padding included), tp ranks of the group.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.parameter import InitMethod, as_init_spec, new_parameter
from megatron.core.param_attrs import ParamAttrs
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_rank, group_size


class VocabParallelEmbedding(MegatronModule):
    """Table [v, h] cut along v; ids outside this rank's rows contribute zero to the sum over the ranks.

    Args:
        reduce_scatter_embeddings: Leave the sum as sequence shards [s/tp, b, h] instead of [b, s, h] on all ranks.
        tp_group: Ranks that share the table; None for this rank alone.

    Raises: ConfigError if the group does not divide the rows.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        config: TransformerConfig,
        reduce_scatter_embeddings: bool = False,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.num_embeddings_per_partition = divide(num_embeddings, group_size(tp_group))
        self.reduce_scatter_embeddings, self.tp_group = reduce_scatter_embeddings, tp_group
        attrs = ParamAttrs(
            as_init_spec(init_method),
            partition_dim=0,
            partition_rank=group_rank(tp_group),
            is_embedding_or_output=True,
            full_shape=(num_embeddings, embedding_dim),
        )
        self.weight = new_parameter(config, (self.num_embeddings_per_partition, embedding_dim), attrs)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Look ids up.

        Shapes: input_ int64 [b, s] -> [b, s, h], with `reduce_scatter_embeddings` [s/tp, b, h].
        """
        if group_size(self.tp_group) == 1:
            output = self._rows(input_)
            return output.transpose(0, 1).contiguous() if self.reduce_scatter_embeddings else output
        first = group_rank(self.tp_group) * self.num_embeddings_per_partition
        local = input_ - first
        is_foreign = (local < 0) | (local >= self.num_embeddings_per_partition)
        output = self._rows(local.masked_fill(is_foreign, 0)).masked_fill(is_foreign.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(output.transpose(0, 1), self.tp_group)
        return reduce_from_tensor_model_parallel_region(output, self.tp_group)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the local table: int64 [b, s] -> [b, s, h]."""
        if self.config.deterministic_mode:
            # Indexing has a repeatable backward on a GPU, F.embedding has not.
            return self.weight[ids]
        return F.embedding(ids, self.weight)
