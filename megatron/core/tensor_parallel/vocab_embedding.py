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
from megatron.core.tensor_parallel.partition import require_single_rank
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_rank, group_size


class VocabParallelEmbedding(MegatronModule):
    """Table [v, h] cut along v; ids outside this rank's rows contribute zero.

    Raises: ConfigError if the group has more than one rank.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config)
        require_single_rank(tp_group, type(self).__name__)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.num_embeddings_per_partition = divide(num_embeddings, group_size(tp_group))
        self.tp_group = tp_group
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

        Shapes: input_ int64 [b, s] -> [b, s, h].
        """
        if self.config.deterministic_mode:
            # Indexing has a repeatable backward on a GPU, F.embedding has not.
            return self.weight[input_]
        return F.embedding(input_, self.weight)
