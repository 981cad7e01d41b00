"""Small models and batches that the layout tests share."""

import dataclasses

import torch
import torch.nn.functional as F

from tests.common.layouts import Layout, ModelCase, run_step
from tests.common.reference import TOLERANCE, Batch, StepResult, assert_matches, make_weights, reference_step
from tests.common.reference_model import GptShape

SEQ_LENGTH, VOCAB_SIZE = 6, 13
NUM_EXPERTS, TOPK = 4, 2

ONE_RANK = Layout(micro_batch_size=2)
DP2 = Layout(dp=2)
EP2 = Layout(dp=2, ep=2)
EP2_ALLGATHER = Layout(dp=2, ep=2, dispatcher="allgather")
EP2_FLEX = Layout(dp=2, ep=2, dispatcher="flex")
EP2_DP4 = Layout(dp=4, ep=2)
EP4 = Layout(dp=4, ep=4)
EP4_ALLGATHER = Layout(dp=4, ep=4, dispatcher="allgather")
EP4_FLEX = Layout(dp=4, ep=4, dispatcher="flex")

BASE = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "ffn_hidden_size": 8,
    "num_moe_experts": NUM_EXPERTS,
    "moe_ffn_hidden_size": 4,
    "moe_router_topk": TOPK,
    "moe_layer_freq": [0, 1],
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_hybridep_engine": "collective",
}


def make_case(shape: GptShape | None = None, **changes) -> ModelCase:
    """The base model with some fields changed."""
    return ModelCase(BASE | changes, shape or GptShape(vocab_size=VOCAB_SIZE, max_sequence_length=SEQ_LENGTH))


def make_batch(num_samples: int = 4, seed: int = 1, seq_length: int = SEQ_LENGTH) -> Batch:
    """Random samples, nothing masked."""
    return Batch.random(num_samples, seq_length, VOCAB_SIZE, seed)


def masked_batch(rows: list[int], num_samples: int = 4, seed: int = 1, seq_length: int = SEQ_LENGTH) -> Batch:
    """Random samples of which sample i keeps the loss of its first rows[i] tokens."""
    batch = make_batch(num_samples, seed, seq_length)
    keep = torch.arange(seq_length)[None, :] < torch.tensor(rows)[:, None]
    return dataclasses.replace(batch, loss_mask=keep.double())


def check_against_reference(
    pool, case: ModelCase, layout: Layout, batch: Batch, plan=None, expert_bias=None, tolerance: float = TOLERANCE
) -> StepResult:
    """Run one step and compare everything with the reference cut alike; returns the step's result."""
    config = case.config(Layout(tp=layout.tp, is_sequence_parallel=layout.is_sequence_parallel))
    weights = make_weights(config, case.shape, seed=3)
    got = run_step(pool, case, layout, batch, weights, plan, expert_bias=expert_bias or {})
    expected = reference_step(
        config,
        case.shape,
        batch,
        weights,
        data_parallel_size=layout.dp,
        micro_batch_size=layout.micro_batch_size,
        plan=plan,
        expert_bias=expert_bias,
    )
    assert_matches(expected, got, tolerance)
    return got
