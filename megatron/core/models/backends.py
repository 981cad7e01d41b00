"""Sets of layer implementations: a spec asks a backend for the class of each slot.

`local` is PyTorch and Triton. `transformer_engine` takes the modules of that library through `core/extensions`. A third
set is one more class with the same methods.
"""

from typing import Protocol

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.extensions.transformer_engine.attention import TEDotProductAttention, choose_kernels
from megatron.core.extensions.transformer_engine.grouped import TEGroupedLinear
from megatron.core.extensions.transformer_engine.linear import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.extensions.transformer_engine.norm import TENorm
from megatron.core.extensions.transformer_engine.probe import load_library
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.recompute import recomputes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class BackendSpecProvider(Protocol):
    """The slots of a decoder layer."""

    def column_parallel_linear(self) -> type:
        """Return the class of QKV projection and first MLP matrix."""
        ...

    def norm_column_parallel_linear(self) -> type | None:
        """Return the class of a norm and such a matrix in one; None if they are two modules."""
        ...

    def row_parallel_linear(self) -> type:
        """Return the class of output projection and second MLP matrix."""
        ...

    def grouped_linear(self) -> type | None:
        """Return the class of the grouped matrices of experts; None takes the one that `GroupedMLP` has."""
        ...

    def layer_norm(self) -> type:
        """Return the class of all norms."""
        ...

    def core_attention(self) -> type:
        """Return the class of attention without its projections."""
        ...


class LocalSpecProvider:
    """PyTorch and Triton, on CPU and GPU."""

    def column_parallel_linear(self) -> type:
        """Return the class of QKV projection and first MLP matrix."""
        return ColumnParallelLinear

    def norm_column_parallel_linear(self) -> type | None:
        """Return None: norm and matrix are two modules."""
        return None

    def row_parallel_linear(self) -> type:
        """Return the class of output projection and second MLP matrix."""
        return RowParallelLinear

    def grouped_linear(self) -> type | None:
        """Return None: `GroupedMLP` has its own."""
        return None

    def layer_norm(self) -> type:
        """Return the class of all norms."""
        return WrappedTorchNorm

    def core_attention(self) -> type:
        """Return the class of attention without its projections."""
        return DotProductAttention


class TransformerEngineSpecProvider:
    """Modules of Transformer Engine, and ours where it has nothing that does the same.

    Raises: MissingDependencyError if the library is absent, ConfigError if it is too old.
    """

    def __init__(self, config: TransformerConfig) -> None:
        choose_kernels(config.attention_backend)
        load_library()
        self._config = config
        # the library's norm wants the residual stream in the dtype of its weights
        self._has_norm = not config.fp32_residual_connection

    def column_parallel_linear(self) -> type:
        """Return the class of QKV projection and first MLP matrix."""
        return TEColumnParallelLinear

    def norm_column_parallel_linear(self) -> type | None:
        """Return norm and matrix in one; None if the norm is to be recomputed, which takes a module of its own."""
        is_fused = self._has_norm and not recomputes(self._config, "layernorm")
        return TELayerNormColumnParallelLinear if is_fused else None

    def row_parallel_linear(self) -> type:
        """Return the class of output projection and second MLP matrix."""
        return TERowParallelLinear

    def grouped_linear(self) -> type | None:
        """Return the class of the grouped matrices of experts."""
        return TEGroupedLinear

    def layer_norm(self) -> type:
        """Return the class of all norms."""
        return TENorm if self._has_norm else WrappedTorchNorm

    def core_attention(self) -> type:
        """Return the class of attention; ours for plain products and for scores divided by the layer number."""
        is_plain = self._config.attention_backend == "local" or self._config.apply_query_key_layer_scaling
        return DotProductAttention if is_plain else TEDotProductAttention


def get_backend(config: TransformerConfig | None = None, use_transformer_engine: bool = False) -> BackendSpecProvider:
    """Return the backend; raises what its class raises."""
    if not use_transformer_engine:
        return LocalSpecProvider()
    assert config is not None, "use_transformer_engine=True: the choice of modules follows from the configuration"
    return TransformerEngineSpecProvider(config)
