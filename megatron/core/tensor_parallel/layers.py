"""The tensor-parallel layers under the path that users of Megatron import."""

from megatron.core.tensor_parallel.column_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.row_parallel import RowParallelLinear
from megatron.core.tensor_parallel.vocab_embedding import VocabParallelEmbedding

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]
