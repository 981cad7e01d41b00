"""The input of the decoder: word embedding, learned positions, dropout.

Under sequence parallelism each rank leaves with its shard of the sequence. Without learned positions the sum over the
rows of the table and the cut are one reduce-scatter; with them the whole sequence gets its positions first, so that
every rank has the whole gradient of the position table.

Legend: b batch, s sequence, h width, tp tensor-parallel ranks.
"""

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.parameter import hidden_init, new_parameter
from megatron.core.param_attrs import ParamAttrs
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.random import random_region
from megatron.core.utils.upcast import upcast

PositionEmbeddingType = Literal["learned_absolute", "rope", "none"]


class PositionEmbedding(MegatronModule):
    """Table of learned positions, the same on all ranks."""

    def __init__(self, max_sequence_length: int, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = new_parameter(config, (max_sequence_length, config.hidden_size), ParamAttrs(hidden_init(config)))

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Look positions up: int64 [b, s] -> [b, s, h]."""
        return self.weight[position_ids] if self.config.deterministic_mode else F.embedding(position_ids, self.weight)


class LanguageModelEmbedding(MegatronModule):
    """Embeds tokens and, for `learned_absolute`, adds their positions.

    Args:
        vocab_size: Rows of the table, padding included.
        max_sequence_length: Rows of the position table.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: PositionEmbeddingType = "learned_absolute",
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=hidden_init(config),
            config=config,
            reduce_scatter_embeddings=config.sequence_parallel and position_embedding_type != "learned_absolute",
            tp_group=tp_group,
        )
        self.position_embeddings: PositionEmbedding | None = None
        if position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(max_sequence_length, config)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Embed: int64 [b, s] and, with learned positions, int64 [b, s] -> [s, b, h], a sequence shard [s/tp, b, h]."""
        embeddings = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            assert position_ids is not None, "position_ids=None: learned positions need the position of each token"
            embeddings = embeddings + self.position_embeddings(position_ids)
        if not self.word_embeddings.reduce_scatter_embeddings:
            # [b, s, h] -> [s, b, h]
            embeddings = embeddings.transpose(0, 1).contiguous()
            if self.config.sequence_parallel:
                embeddings = scatter_to_sequence_parallel_region(embeddings, self.tp_group)
        if self.config.fp32_residual_connection:
            embeddings = upcast(embeddings)
        draws = self.training and self.config.hidden_dropout > 0.0
        with random_region(draws and self.config.sequence_parallel):
            return F.dropout(embeddings, self.config.hidden_dropout, self.training)
