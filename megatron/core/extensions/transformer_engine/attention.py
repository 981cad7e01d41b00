"""Core attention of Transformer Engine, in place of `DotProductAttention`.

The library chooses among flash-attn, cuDNN and plain products by shape, precision and NVTE_* variables. Under context
parallelism it exchanges keys and values itself; each rank holds chunks r and 2P - 1 - r of a sequence, as in this tree.

`--attention-backend` becomes those variables, unless the user has set them: the library reads nothing else.

Legend: s sequence, b batch, n query heads and g groups (key and value heads) of this rank, d channels of a head.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron.core import env
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.extensions.transformer_engine.probe import load_library
from megatron.core.module_api.module import MegatronModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import random_region
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_size

_KERNELS = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}


def choose_kernels(attention_backend: str) -> None:
    """Allow the library the kernels of `--attention-backend` alone; `auto` leaves the choice to it."""
    for name, variable in _KERNELS.items() if attention_backend in _KERNELS else ():
        env.set_default(variable, "1" if name == attention_backend else "0")


class TEDotProductAttention(MegatronModule):
    """Core attention: no parameters; arguments as for `DotProductAttention`."""

    _engine: Any

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        self.is_causal = attn_mask_type.name == "causal"
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.is_shared = group_size(groups.cp) > 1
        library, arguments = load_library(), {}
        if self.is_shared:
            library.need("context_parallel", f"context_parallel_size={config.context_parallel_size}")
            arguments = _sharing_arguments(config, layer_number, groups)
        assert config.kv_channels is not None, "kv_channels=None: heads without a width"
        engine = library.root.pytorch.DotProductAttention(
            divide(config.num_attention_heads, group_size(groups.tp)),
            config.kv_channels,
            num_gqa_groups=divide(config.num_query_groups, group_size(groups.tp)),
            attention_dropout=self.dropout,
            qkv_format="sbhd",
            attn_mask_type="causal" if self.is_causal else "no_mask",
            softmax_scale=softmax_scale,
            layer_number=layer_number,
            **arguments,
        )
        object.__setattr__(self, "_engine", engine)  # no child of this module

    def train(self, mode: bool = True) -> "TEDotProductAttention":
        """Switch the engine as well: it draws dropout in training only."""
        super().train(mode)
        if "_engine" in self.__dict__:
            self._engine.train(mode)
        return self

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Shapes: query [s, b, n, d], key and value [s, b, g, d], attention_mask bool broadcastable to [b, 1, s, s],
            True = masked -> [s, b, n * d]. Under context parallelism s is this rank's part of the sequence.
        Raises: ConfigError for a mask under context parallelism.
        """
        kind, mask = ("causal" if self.is_causal else "no_mask"), None
        if attention_mask is not None:
            if self.is_shared:
                raise ConfigError(
                    "transformer_impl='transformer_engine' with context_parallel_size above 1: it takes no mask there; "
                    "drop --reset-attention-mask, or use --transformer-impl local."
                )
            kind, mask = "arbitrary", self._whole_mask(attention_mask, query)
        with random_region(self.training and self.dropout > 0.0):  # heads are split over tensor-parallel ranks
            output = self._engine(query, key, value, attention_mask=mask, attn_mask_type=kind)
        return output.reshape(*output.shape[:2], -1)

    def _whole_mask(self, mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Mask bool broadcastable to [b, 1, s, s] with later positions, query [s, b, n, d] -> [b, 1, s, s]."""
        size, batch = query.shape[:2]
        if self.is_causal:
            mask = mask | torch.ones(size, size, dtype=torch.bool, device=query.device).triu_(1)
        return mask.expand(batch, 1, size, size)


def _sharing_arguments(config: TransformerConfig, layer_number: int, groups: ProcessGroupCollection) -> dict[str, Any]:
    """Arguments by which the library exchanges keys and values over the context-parallel ranks."""
    assert groups.cp is not None, "context_parallel_size above 1 without a group"
    return {
        "cp_group": groups.cp,
        "cp_global_ranks": dist.get_process_group_ranks(groups.cp),
        "cp_stream": torch.cuda.Stream() if torch.cuda.is_available() else None,
        "cp_comm_type": config.cp_comm_types[layer_number - 1],
    }
