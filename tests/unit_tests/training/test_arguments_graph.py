"""Flags of captured steps and row budgets: old spellings, and every refusal with what to do."""

import logging
import re

import pytest
import torch

from megatron.core import env
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training.arguments import parse_args
from tests.common.moe_layers import moe_config

GPU_RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --train-iters 3 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 32 "
    "--num-experts 4 --moe-token-dispatcher-type alltoall "
)


GRAPH = "--cuda-graph-impl full_iteration"


@pytest.fixture(autouse=True)
def _quiet():
    yield
    logging.getLogger("megatron").handlers.clear()


def problems(flags):
    try:
        parse_args((GPU_RUN + flags).split())
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "flags",
    [
        "--cuda-graph-impl full_iteration",
        "--cuda-graph-scope full_iteration",
        "--enable-cuda-graph --cuda-graph-scope full_iteration",
        "--external-cuda-graph --cuda-graph-scope full_iteration",
    ],
)
def test_spellings_of_a_captured_iteration(flags):
    args = parse_args((GPU_RUN + flags).split())
    assert args.cuda_graph_impl == "full_iteration"
    assert args.cuda_graph_warmup_steps == 3


REFUSED = {
    "--device cpu --cuda-graph-impl full_iteration": "device='cpu': a CUDA graph needs a GPU; drop --cuda-graph-impl",
    "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 1": "cuda_graph_warmup_steps=1 .*set .* to 2 or more",
    "--enable-cuda-graph": r"cuda_graph_impl='local': .*full_iteration, or none \(given: --enable-cuda-graph\)",
    "--cuda-graph-impl transformer_engine": "graphs of single layers are left out: .*use --cuda-graph-impl full_iter",
    "--cuda-graph-impl full_iteration --cuda-graph-modules attn": "CUDA graphs of single layers: left out .*drop the",
    "--cuda-graph-impl full_iteration --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1": (
        "weight_decay_incr_style='linear': a captured step keeps the weight decay .*use --weight-decay-incr-style const"
    ),
    "--cuda-graph-impl full_iteration --check-streams": "check_streams=True: a replay shows .* --cuda-graph-impl none",
    "--cuda-graph-impl full_iteration --recompute-granularity selective": (
        "recompute_granularity='selective', .*dropout=0.1: random numbers cannot be drawn a second time .*set --attent"
    ),
    "--moe-rank-capacity-tiers 2": "moe_rank_capacity_tiers=.* tiers follow a first budget; set --moe-expert-rank-cap",
    "--moe-expert-rank-capacity-factor 1.5 --moe-rank-capacity-tiers 3 2": "each tier has more room; list rising",
    "--moe-expert-rank-capacity-factor 0": "a budget holds rows; set a factor above 0",
    "--moe-expert-rank-capacity-factor 1.5 --moe-expert-capacity-factor 1": "keeps every token, .*; drop --moe-expert",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refusal_names_the_flag_and_the_remedy(flags):
    text = problems(flags)
    assert re.search(REFUSED[flags], text), text


def test_mapped_memory_and_registered_buffers_exclude_each_other(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    assert "set NCCL_GRAPH_REGISTER=0" in problems("--cuda-graph-impl full_iteration")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    assert problems("--cuda-graph-impl full_iteration") == ""
    assert env.nccl_graph_register() == "0"
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")  # what the check has set is taken back with the fixture


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "kept in a pool .*; drop backend:cudaMallocAsync"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "the driver gives no memory during a capture; unset the variable"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "the host would wait for collectives .*; unset the variable"),
    ],
)
def test_variable_that_breaks_a_capture_is_refused_by_its_name(monkeypatch, name, value, text):
    assert problems(GRAPH) == ""
    monkeypatch.setenv(name, value)
    assert re.search(f"{name}.* with cuda_graph_impl='full_iteration': .*{text}", problems(GRAPH))
    assert name not in problems("")


def blockers(needs_host_counts=False, **fields):
    layer = MoELayer(moe_config(**fields), layer_number=1, pg_collection=ProcessGroupCollection())
    if needs_host_counts:  # as the grouped layers of Transformer Engine do
        layer.experts.linear_fc1.needs_host_counts = True
    return [
        line
        for module in layer.modules()
        if hasattr(module, "graph_capture_blockers")
        for line in module.graph_capture_blockers()
    ]


PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
BF16 = {"bf16": True, "moe_grouped_gemm": True}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {**BF16, "moe_expert_capacity_factor": 1.0},
            "the host reads how many rows .*--moe-expert-rank-capacity-factor",
        ),
        ({"bf16": True}, "moe_grouped_gemm=False: experts in sequence need their counts .*add --moe-grouped-gemm"),
        ({"moe_grouped_gemm": True, "params_dtype": torch.float32}, "params_dtype=torch.float32: .*add --bf16"),
        (
            {**BF16, "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
            "'sinkhorn': the host reads after every round .*use --moe-router-load-balancing-type aux_loss",
        ),
        (
            {**BF16, "needs_host_counts": True},
            "transformer_impl='transformer_engine': its experts need their row counts .*--transformer-impl local",
        ),
    ],
    ids=["exact-sizes", "sequence", "fp32", "sinkhorn", "engine"],
)
def test_module_that_cannot_be_captured_says_why(fields, text):
    (found,) = blockers(**fields)
    assert re.search(text, found), found


@pytest.mark.parametrize(
    "fields", [BF16, {**PADDED}, {**BF16, **PADDED}, {**BF16, "moe_expert_rank_capacity_factor": 1.2}]
)
def test_module_that_can_be_captured_says_nothing(fields):
    assert blockers(**fields) == []
