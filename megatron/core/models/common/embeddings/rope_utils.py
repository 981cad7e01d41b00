"""Rotary embedding of a tensor under the path and signature that users of Megatron import."""

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fusions.fused_rope import RotaryTables, apply_rotary


def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Turn the channels of each head by angles: t [s, b, n, c], freqs [s, 1, 1, d] -> [s, b, n, c]."""
    tables = RotaryTables.from_angles(freqs.to(t.device), t.dtype)
    return apply_rotary(t, tables, config.rotary_interleaved, config.apply_rope_fusion)
