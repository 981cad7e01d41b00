"""TransformerConfig without a command line: open values are derived, everything broken is reported at once."""

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig

SIZES = {"num_layers": 4, "hidden_size": 96, "num_attention_heads": 6}
MOE = {**SIZES, "num_moe_experts": 8}


def messages(**fields):
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(**fields)
    return str(caught.value).split("\n")


def test_open_values_are_derived():
    config = TransformerConfig(**MOE)
    derived = (config.ffn_hidden_size, config.kv_channels, config.num_query_groups, config.moe_ffn_hidden_size)
    assert derived == (384, 16, 6, 384)
    assert (config.params_dtype, config.expert_tensor_parallel_size) == (torch.float32, 1)


def test_gated_width_is_eight_thirds_rounded_down_to_64():
    config = TransformerConfig(
        num_layers=1, hidden_size=112, num_attention_heads=7, gated_linear_unit=True, activation_func=F.silu
    )
    assert config.ffn_hidden_size == 256


def test_given_values_are_kept():
    config = TransformerConfig(**MOE, ffn_hidden_size=100, kv_channels=32, num_query_groups=2, moe_ffn_hidden_size=48)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (100, 32, 2)
    assert config.moe_ffn_hidden_size == 48
    assert "kv_channels" not in config.origins


def test_derived_values_remember_their_origin():
    origins = TransformerConfig(**MOE).origins
    assert origins["kv_channels"] == "hidden_size / num_attention_heads"
    assert origins["moe_ffn_hidden_size"] == "ffn_hidden_size"


@pytest.mark.parametrize(
    ("switches", "dtype"),
    [({}, torch.float32), ({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16)],
    ids=["fp32", "bf16", "fp16"],
)
def test_parameter_dtype_follows_the_switches(switches, dtype):
    assert TransformerConfig(**SIZES, **switches).params_dtype == dtype


def test_float64_is_a_value_without_a_flag():
    assert TransformerConfig(**SIZES, params_dtype=torch.float64).params_dtype == torch.float64


def test_zero_experts_mean_a_dense_model():
    assert TransformerConfig(**SIZES, num_moe_experts=0).num_moe_experts is None


def test_negative_capacity_means_no_drops():
    assert TransformerConfig(**MOE, moe_expert_capacity_factor=-1.0).moe_expert_capacity_factor is None


def test_overlap_gives_the_exchange_multiprocessors():
    on = {**MOE, "overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2}
    assert TransformerConfig(**MOE).moe_flex_dispatcher_num_sms is None
    assert TransformerConfig(**on).moe_flex_dispatcher_num_sms == 16
    assert TransformerConfig(**on, moe_flex_dispatcher_num_sms=8).moe_flex_dispatcher_num_sms == 8


def test_replace_keeps_derived_values():
    config = dataclasses.replace(TransformerConfig(**MOE), moe_router_topk=4)
    assert (config.moe_router_topk, config.kv_channels) == (4, 16)


def test_all_violations_come_at_once():
    lines = messages(**{**MOE, "hidden_size": 97}, moe_router_topk=9, bf16=True, fp16=True, context_parallel_size=2)
    assert [line.split(":")[0] for line in lines] == [
        "bf16=True with fp16=True",
        "hidden_size=97 with num_attention_heads=6",
        "moe_router_topk=9 with num_moe_experts=8",
        "context_parallel_size=2 with attention_dropout=0.1",
    ]


@pytest.mark.parametrize(
    ("fields", "subject", "constraint"),
    [
        ({"moe_router_topk": 9}, "moe_router_topk=9 with num_moe_experts=8", "cannot choose one twice"),
        ({"moe_router_topk": 0}, "moe_router_topk=0 with num_moe_experts=8", "at least one expert"),
        ({"moe_router_topk": 1}, "moe_router_topk=1", "softmax over a single chosen expert is always 1"),
        ({"expert_model_parallel_size": 3}, "num_moe_experts=8 with expert_model_parallel_size=3", "same number"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "moe_router_num_groups=3", "equal sizes"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 5}, "moe_router_group_topk=5", "some of the groups"),
        ({"moe_router_num_groups": 4}, "moe_router_group_topk=None", "both numbers"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias=True", "single experts"),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, "moe_router_load", "its own coefficient"),
        (
            {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.1},
            "moe_router_load_balancing_type='sinkhorn'",
            "no auxiliary loss",
        ),
        (
            {"moe_router_load_balancing_type": "sinkhorn", "moe_expert_capacity_factor": 1.0},
            "moe_expert_capacity_factor=1.0",
            "no capacity",
        ),
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor=0.0", "no expert has room for a token"),
        ({"moe_pad_expert_input_to_capacity": True}, "moe_pad_expert_input_to_capacity=True", "no capacity to pad to"),
        ({"moe_flex_dispatcher_num_sms": 0}, "moe_flex_dispatcher_num_sms=0", "a kernel runs on at least one"),
        ({"moe_layer_freq": [1, 0]}, "moe_layer_freq=[1, 0] with num_layers=4", "one 0 or 1 for each layer"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0 with num_layers=4", "positive integer"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input=True", "one expert per token"),
        ({"num_query_groups": 4}, "num_query_groups=4 with num_attention_heads=6", "same number of heads"),
        ({"attention_dropout": 1.0}, "attention_dropout=1.0", "a probability below 1"),
        ({"fp32_residual_connection": True}, "fp32_residual_connection=True", "model's precision already"),
        (
            {"context_parallel_size": 2},
            "context_parallel_size=2 with attention_dropout=0.1",
            "share no random numbers; set --attention-dropout 0",
        ),
        (
            {"context_parallel_size": 2, "cp_comm_type": "a2a+p2p"},
            "cp_comm_type='a2a+p2p' with context_parallel_size=2",
            "without levels; use --cp-comm-type p2p, all_gather or a2a",
        ),
        (
            {"context_parallel_size": 4, "cp_comm_type": "a2a"},
            "cp_comm_type='a2a' with num_attention_heads=6",
            "multiples of TP * CP, or use --cp-comm-type p2p",
        ),
        (
            {"cp_comm_type": ["p2p", "a2a"]},
            "cp_comm_type=['p2p', 'a2a'] with num_layers=4",
            "one entry, or as many as --num-layers",
        ),
        ({"cp_comm_type": "ring"}, "cp_comm_type='ring'", "p2p, all_gather, allgather, a2a"),
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0", "at least one rank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_violation_names_field_and_constraint(fields, subject, constraint):
    lines = messages(**{**MOE, **fields})
    assert any(line.startswith(subject) and constraint in line and "; " in line for line in lines), lines


def test_four_entry_pattern_fits_four_layers():
    assert TransformerConfig(**MOE, moe_layer_freq=[1, 0, 1, 0]).moe_layer_freq == [1, 0, 1, 0]


def test_dense_model_ignores_routing_fields():
    assert TransformerConfig(**SIZES, moe_router_topk=99).num_moe_experts is None


def test_parallel_topic_stands_alone():
    config = ModelParallelConfig(tensor_model_parallel_size=2)
    assert (config.expert_tensor_parallel_size, config.sequence_parallel) == (2, False)


def test_unknown_draft_field_is_refused():
    with pytest.raises(ConfigError, match="hidden_sizes: no such field"):
        TransformerConfig.draft(hidden_sizes=3)


def test_import_initialises_no_cuda():
    code = "import megatron.core.configs.transformer, torch; raise SystemExit(torch.cuda.is_initialized())"
    assert subprocess.run([sys.executable, "-c", code], check=False, env={"CUDA_VISIBLE_DEVICES": ""}).returncode == 0
