"""Bytes that the model state of one rank takes, computed from the arguments before anything is allocated.

Legend: h hidden size, q and kv widths of query heads and of key (or value) heads, f MLP width, E experts per rank.
Activations are not part of the estimate.
"""

import argparse
import logging
from dataclasses import dataclass

import torch

from megatron.core.configs.layer_pattern import moe_layer_pattern
from megatron.core.pipeline_layout import stage_layers
from megatron.core.utils.logging import get_logger, log_single_rank
from megatron.training.arguments import core_transformer_config_from_args

logger = get_logger(__name__)

MEBIBYTE = 1024 * 1024
FP32_BYTES = 4


@dataclass(frozen=True)
class RankParameters:
    """Elements of the parameters of one rank, by the group that reduces their gradients."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """All elements."""
        return self.dense + self.expert


def _norm(args: argparse.Namespace, width: int) -> int:
    return width * (1 if args.normalization == "RMSNorm" else 2)


def _mlp(args: argparse.Namespace, ffn_size: int, has_bias: bool, ranks: int) -> int:
    """Elements on one of `ranks` of an MLP of width `ffn_size`: fc1 (gate and up if gated), fc2 and their biases."""
    h, width = args.hidden_size, ffn_size // ranks
    fc1_rows = width * (2 if args.swiglu else 1)
    return fc1_rows * h + h * width + (fc1_rows + h if has_bias else 0)


def _attention(args: argparse.Namespace) -> int:
    h, ranks = args.hidden_size, args.tensor_model_parallel_size
    q = args.kv_channels * args.num_attention_heads // ranks
    qkv_rows = q + 2 * args.kv_channels * args.num_query_groups // ranks
    biases = (qkv_rows if args.add_qkv_bias else 0) + (h if args.add_bias_linear else 0)
    qk_norms = 2 * _norm(args, args.kv_channels) if args.qk_layernorm else 0
    return qkv_rows * h + h * q + biases + qk_norms


def _shared_experts(args: argparse.Namespace) -> int:
    if not args.moe_shared_expert_intermediate_size:
        return 0
    gate = args.hidden_size if args.moe_shared_expert_gate else 0
    size, ranks = args.moe_shared_expert_intermediate_size, args.tensor_model_parallel_size
    return _mlp(args, size, has_bias=False, ranks=ranks) + gate


def rank_parameters(args: argparse.Namespace, pipeline_rank: int = 0) -> RankParameters:
    """Count the parameters that one rank of a pipeline stage holds."""
    h = args.hidden_size
    stages = stage_layers(core_transformer_config_from_args(args))
    pattern = moe_layer_pattern(args.moe_layer_freq, args.num_layers, args.num_experts)
    flags = [
        pattern[layer] for layers in stages[pipeline_rank :: args.pipeline_model_parallel_size] for layer in layers
    ]
    num_moe, num_dense = flags.count(True), flags.count(False)
    ranks = args.tensor_model_parallel_size
    is_first, is_last = pipeline_rank == 0, pipeline_rank == args.pipeline_model_parallel_size - 1
    has_output = is_last and (args.untie_embeddings_and_output_weights or not is_first)
    dense = args.padded_vocab_size // ranks * h * (is_first + has_output)
    if args.position_embedding_type == "learned_absolute" and is_first:
        dense += args.max_position_embeddings * h
    dense += _norm(args, h) if is_last else 0
    dense += len(flags) * (_attention(args) + 2 * _norm(args, h))
    dense += num_dense * _mlp(args, args.ffn_hidden_size, args.add_bias_linear, ranks)
    if not num_moe:
        return RankParameters(dense, 0)
    dense += num_moe * (args.num_experts * h + _shared_experts(args))
    local_experts = args.num_experts // args.expert_model_parallel_size
    one_expert = _mlp(args, args.moe_ffn_hidden_size, args.add_bias_linear, args.expert_tensor_parallel_size)
    expert = num_moe * local_experts * one_expert
    return RankParameters(dense, expert)


def parameter_bytes(args: argparse.Namespace, pipeline_rank: int = 0) -> int:
    """Bytes of the weights of one rank."""
    return rank_parameters(args, pipeline_rank).total * torch.finfo(args.params_dtype).bits // 8


def optimizer_bytes_per_element(args: argparse.Namespace) -> int:
    """Bytes of optimizer state per parameter: moments, and a main copy of half-precision weights."""
    size = {"fp32": FP32_BYTES, "bf16": 2}
    adam = size[args.exp_avg_dtype] + size[args.exp_avg_sq_dtype]
    moments = {"adam": adam, "sgd": FP32_BYTES if args.sgd_momentum else 0}[args.optimizer]
    return moments + (0 if args.params_dtype == torch.float32 else FP32_BYTES)


def optimizer_bytes(args: argparse.Namespace, pipeline_rank: int = 0) -> int:
    """Bytes of optimizer state of one rank; with the distributed optimizer of its shards."""
    count = rank_parameters(args, pipeline_rank)
    dense_shards = expert_shards = 1
    if args.use_distributed_optimizer:
        dense_shards = args.data_parallel_size * args.context_parallel_size
        expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        model_ranks = expert_tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
        expert_shards = args.world_size // model_ranks
    kept = -(-count.dense // dense_shards) + -(-count.expert // expert_shards)
    return kept * optimizer_bytes_per_element(args)


def report_memory_estimate(args: argparse.Namespace) -> None:
    """Log on rank 0 what weights, main gradients and optimizer state will take, on the rank that holds the most."""
    stages = args.pipeline_model_parallel_size
    fullest = max(range(stages), key=lambda rank: rank_parameters(args, rank).total)
    count = rank_parameters(args, fullest)
    grad_bytes = 2 if args.grad_reduce_in_bf16 or args.main_grads_dtype == "bf16" else FP32_BYTES
    parts = {
        "weights": parameter_bytes(args, fullest),
        "main gradients": count.total * grad_bytes,
        "optimizer": optimizer_bytes(args, fullest),
    }
    where = "a rank" if stages == 1 else f"a rank of pipeline stage {fullest}, the fullest"
    text = ", ".join(f"{name} {size / MEBIBYTE:.1f}" for name, size in parts.items())
    log_single_rank(
        logger,
        logging.INFO,
        f"parameters on {where}: {count.dense} dense + {count.expert} expert; MiB of model state: {text}, "
        f"together {sum(parts.values()) / MEBIBYTE:.1f} (activations not counted)",
    )
