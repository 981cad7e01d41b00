"""Floating point operations of a training step by Megatron's convention.

A multiply-add counts as 2, forward plus backward as 3 times forward. Matrix products and the core of attention are
counted; norms, routing, permutation, activations and recomputation are not. With t tokens in sequences of length s:

    6 * t * (experts and dense MLPs + attention projections + attention core + MTP projections + vocabulary)

Legend: h hidden size, q width of all query heads, kv width of all key (or value) heads, f MLP width, k experts per
token.
"""

import argparse
from dataclasses import dataclass

from megatron.core.configs.layer_pattern import moe_layer_pattern

FLOPS_PER_WEIGHT = 6
"""2 for the multiply-add, times 3 for forward, input gradient and weight gradient."""


@dataclass(frozen=True)
class LatentAttentionShape:
    """Widths of multi-latent attention."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class FlopsShape:
    """The numbers of a model that its cost depends on."""

    hidden_size: int
    seq_length: int
    padded_vocab_size: int
    num_attention_heads: int
    kv_channels: int
    num_query_groups: int
    ffn_hidden_size: int
    is_gated: bool
    num_dense_layers: int
    num_moe_layers: int
    """Multi-token-prediction depths included."""
    moe_ffn_hidden_size: int = 0
    moe_router_topk: int = 0
    shared_expert_size: int = 0
    num_mtp_layers: int = 0
    latent_attention: LatentAttentionShape | None = None


def _attention_weights(shape: FlopsShape) -> int:
    """Weights of the attention projections of one layer that a token is multiplied with."""
    h, n = shape.hidden_size, shape.num_attention_heads
    mla = shape.latent_attention
    if mla is None:
        q, kv = shape.kv_channels * n, shape.kv_channels * shape.num_query_groups
        return h * (q + 2 * kv) + q * h
    return (
        mla.q_lora_rank * (h + n * (mla.qk_head_dim + mla.qk_pos_emb_head_dim) + 1)
        + mla.kv_lora_rank * (h + n * (mla.qk_head_dim + mla.v_head_dim) + 1)
        + h * mla.qk_pos_emb_head_dim
        + n * mla.v_head_dim * h
    )


def _attention_core(shape: FlopsShape) -> float:
    """Multiply-adds of scores and context per token and layer; a causal mask halves them."""
    n = shape.num_attention_heads
    mla = shape.latent_attention
    if mla is None:
        qk_width = v_width = shape.kv_channels * n
    else:
        qk_width, v_width = n * (mla.qk_head_dim + mla.qk_pos_emb_head_dim), n * mla.v_head_dim
    return shape.seq_length * (qk_width + v_width) / 2


def flops_per_token(shape: FlopsShape) -> float:
    """Forward and backward operations per token of the whole model."""
    h = shape.hidden_size
    matrices = 3 if shape.is_gated else 2
    moe_width = shape.moe_ffn_hidden_size * shape.moe_router_topk + shape.shared_expert_size
    num_layers = shape.num_dense_layers + shape.num_moe_layers
    multiply_adds = (
        shape.num_dense_layers * h * shape.ffn_hidden_size * matrices
        + shape.num_moe_layers * h * moe_width * matrices
        + num_layers * (_attention_weights(shape) + _attention_core(shape))
        + shape.num_mtp_layers * (3 * h + 2 * h * h)
        + (1 + shape.num_mtp_layers) * h * shape.padded_vocab_size
    )
    return FLOPS_PER_WEIGHT * multiply_adds


def flops_shape(args: argparse.Namespace) -> FlopsShape:
    """Read the shape of the model from parsed arguments."""
    flags = moe_layer_pattern(args.moe_layer_freq, args.num_layers, args.num_experts)
    return FlopsShape(
        hidden_size=args.hidden_size,
        seq_length=args.seq_length,
        padded_vocab_size=args.padded_vocab_size,
        num_attention_heads=args.num_attention_heads,
        kv_channels=args.kv_channels,
        num_query_groups=args.num_query_groups,
        ffn_hidden_size=args.ffn_hidden_size,
        is_gated=args.swiglu,
        num_dense_layers=flags.count(False),
        num_moe_layers=flags.count(True),
        moe_ffn_hidden_size=args.moe_ffn_hidden_size or 0,
        moe_router_topk=args.moe_router_topk,
        shared_expert_size=args.moe_shared_expert_intermediate_size or 0,
    )


def num_floating_point_operations(args: argparse.Namespace, batch_size: int) -> float:
    """Operations of one step over `batch_size` sequences, all ranks together."""
    return flops_per_token(flops_shape(args)) * args.seq_length * batch_size
