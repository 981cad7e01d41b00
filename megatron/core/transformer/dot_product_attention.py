"""Scaled dot-product attention of the `local` implementation.

    softmax(scale * Q K^T + mask) V

Query heads come in groups; the heads of a group share one key and one value head. Torch's fused kernels do the work,
unless the plain path is asked for or needed: it alone scales scores by the layer number and chooses the softmax dtype.

Under context parallelism a rank holds queries, keys and values of its part of the sequence; see `context_parallel`.

Legend: s sequence, b batch, n query heads, g key and value heads (groups), d channels of a head.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.configs.base import Violation, violation
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.fusions.fused_block_attention import BlockKernel, FlashKernel, PlainKernel
from megatron.core.fusions.fused_softmax import scale_mask_softmax
from megatron.core.module_api.module import MegatronModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import random_region
from megatron.core.transformer.context_parallel import BlockAttention, HeadExchange, build_context_parallel
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.utils.device import resolve_device, uses_gpu
from megatron.core.utils.groups import group_size

_PLAIN = ("unfused", "local")
_HALF = (torch.bfloat16, torch.float16)
_GPU_KERNELS = {
    "auto": None,
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION],
}
# Of the fused kernels only flash repeats bit for bit, and only under torch.use_deterministic_algorithms.
_REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class DotProductAttention(MegatronModule):
    """Core attention: no parameters.

    Args:
        layer_number: Counted from 1; the divisor of `apply_query_key_layer_scaling`.
        attn_mask_type: `causal` hides later positions whatever mask is given.
        attention_dropout: By default `config.attention_dropout`.
        softmax_scale: By default 1 / sqrt(d).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        found = self.check(config)
        if found:
            raise ConfigError("\n".join(str(item) for item in found))
        self.attn_mask_type = attn_mask_type
        self.dropout_prob = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.score_divisor = float(layer_number) if config.apply_query_key_layer_scaling else 1.0
        self.softmax_in_fp32 = config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling
        self.is_plain = config.attention_backend in _PLAIN or config.apply_query_key_layer_scaling
        self.kernels = None if self.is_plain else _kernels(config)
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        self.over_ranks = self._over_ranks(config, layer_number, groups)

    @staticmethod
    def check(config: TransformerConfig) -> list[Violation]:
        """Judge the choice of a kernel on a GPU; matrix products, and the kernel of a CPU, do everything."""
        if config.attention_backend in _PLAIN or config.apply_query_key_layer_scaling or not uses_gpu(config.device):
            return []
        return [*_kernel_problems(config), *_block_problems(config)]

    def _over_ranks(
        self, config: TransformerConfig, layer_number: int, groups: ProcessGroupCollection
    ) -> BlockAttention | HeadExchange | None:
        """Return how the ranks that share a sequence attend together; None if a rank has whole sequences."""
        if groups.cp is None or group_size(groups.cp) == 1:
            return None
        plain = PlainKernel(self.scale)
        kernel = plain if self.is_plain else _block_kernel(config, plain)
        comm_type = config.cp_comm_types[layer_number - 1]
        return build_context_parallel(comm_type, groups.cp, kernel, plain, self._attend)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
    ) -> torch.Tensor:
        """Attend.

        Shapes: query [s, b, n, d], key and value [s, b, g, d], attention_mask bool broadcastable to [b, 1, s, s],
            True = masked -> [s, b, n * d]. Under context parallelism s is this rank's part of the sequence, the last
            dimension of the mask the whole of it.
        """
        is_causal = (self.attn_mask_type if attn_mask_type is None else attn_mask_type) is AttnMaskType.causal
        attend = self._attend if self.over_ranks is None else self.over_ranks.attend
        # [s, b, n, d] -> [b, n, s, d]
        heads = (query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3))
        output = attend(*heads, attention_mask, is_causal)
        return output.permute(2, 0, 1, 3).flatten(2)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        """[b, n, s, d], [b, g, s, d] -> [b, n, s, d] for whole sequences."""
        attend = self._attend_plain if self.is_plain else self._attend_fused
        return attend(query, key, value, mask, is_causal)

    def _attend_fused(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        """[b, n, s, d], [b, g, s, d] -> [b, n, s, d] by one of torch's kernels."""
        dropout = self.dropout_prob if self.training else 0.0  # heads are split over tensor-parallel ranks
        kept = None
        if mask is not None:
            kept = ~(mask | _later_positions(query.shape[2], query.device) if is_causal else mask)
        with random_region(dropout > 0.0), nullcontext() if self.kernels is None else sdpa_kernel(self.kernels):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=kept,
                dropout_p=dropout,
                is_causal=is_causal and kept is None,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )

    def _attend_plain(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        """[b, n, s, d], [b, g, s, d] -> [b, n, s, d] by matrix products."""
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        if is_causal:
            later = _later_positions(query.shape[2], query.device)
            mask = later if mask is None else mask | later
        scores = torch.matmul(query * (self.scale / self.score_divisor), key.transpose(2, 3))
        probs = scale_mask_softmax(scores, mask, self.score_divisor, self.softmax_in_fp32)
        dropout = self.dropout_prob if self.training else 0.0
        with random_region(dropout > 0.0):
            probs = F.dropout(probs, dropout, self.training)
        return torch.matmul(probs, value)


def _kernel_problems(config: TransformerConfig) -> Iterator[Violation]:
    """Yield what a kernel that the configuration names cannot do."""
    backend = config.attention_backend
    if backend != "auto" and config.params_dtype not in _HALF:
        why, remedy = "the kernel is for bf16 and fp16", "add --bf16 or use --attention-backend auto"
        yield violation(config, "attention_backend params_dtype", why, remedy)
    if backend == "fused" and config.deterministic_mode:
        why, remedy = "cuDNN's backward does not repeat bit for bit", "use --attention-backend flash or auto"
        yield violation(config, "attention_backend deterministic_mode", why, remedy)


def _block_problems(config: TransformerConfig) -> Iterator[Violation]:
    """Yield what the flash kernel, which takes blocks of keys in half precision, cannot do."""
    goes_by_blocks = config.context_parallel_size > 1 and set(config.cp_comm_types) != {"a2a"}
    if not goes_by_blocks or config.params_dtype not in _HALF:
        return
    if config.attention_backend == "fused":
        remedy = "use --attention-backend flash or auto, or --cp-comm-type a2a"
        why = "blocks of keys go through the flash kernel"
        yield violation(config, "attention_backend context_parallel_size", why, remedy)
    if (config.kv_channels or 0) % 8:
        remedy = "use --attention-backend unfused or --cp-comm-type a2a"
        why = "the flash kernel needs a multiple of 8"
        yield violation(config, "kv_channels context_parallel_size", why, remedy)


def _kernels(config: TransformerConfig) -> list[SDPBackend] | None:
    """Return the kernels that torch may take; None leaves the choice to torch, as on a CPU, which has only one."""
    if resolve_device(config.device).type == "cpu":
        return None
    backend = AttnBackend(config.attention_backend).value
    return _REPEATABLE if config.deterministic_mode and backend == "auto" else _GPU_KERNELS[backend]


def _block_kernel(config: TransformerConfig, plain: PlainKernel) -> BlockKernel:
    """Return the kernel for blocks of keys, which must tell its log-sum-exp: flash on a GPU, else the plain one."""
    is_on_cpu = resolve_device(config.device).type == "cpu"
    return plain if is_on_cpu or config.params_dtype not in _HALF else FlashKernel(plain.scale)


def _later_positions(size: int, device: torch.device) -> torch.Tensor:
    """Return bool [s, s], True where the key comes after the query."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)
