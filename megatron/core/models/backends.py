"""Sets of layer implementations: a spec asks a backend for the class of each slot.

`local` is PyTorch alone. `LocalSpecProvider` is the pattern for another set: one method per slot.
"""

from typing import Protocol

from megatron.core.errors import ConfigError
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class BackendSpecProvider(Protocol):
    """The slots of a decoder layer."""

    def column_parallel_linear(self) -> type:
        """Return the class of QKV projection and first MLP matrix."""
        ...

    def row_parallel_linear(self) -> type:
        """Return the class of output projection and second MLP matrix."""
        ...

    def layer_norm(self) -> type:
        """Return the class of all norms."""
        ...

    def core_attention(self) -> type:
        """Return the class of attention without its projections."""
        ...


class LocalSpecProvider:
    """PyTorch, on CPU and GPU."""

    def column_parallel_linear(self) -> type:
        """Return the class of QKV projection and first MLP matrix."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Return the class of output projection and second MLP matrix."""
        return RowParallelLinear

    def layer_norm(self) -> type:
        """Return the class of all norms."""
        return WrappedTorchNorm

    def core_attention(self) -> type:
        """Return the class of attention without its projections."""
        return DotProductAttention


def get_backend(use_transformer_engine: bool) -> BackendSpecProvider:
    """Return the backend; raises ConfigError for Transformer Engine, which has no provider in this tree."""
    if use_transformer_engine:
        raise ConfigError(
            "transformer_impl='transformer_engine': this tree has no Transformer Engine layers; "
            "use --transformer-impl local or auto."
        )
    return LocalSpecProvider()
