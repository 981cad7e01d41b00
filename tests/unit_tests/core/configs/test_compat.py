"""The rule table: ids are unique, rows say what to do, and each row can be violated."""

import pytest

from megatron.core.configs.compat import RULES, judge
from megatron.core.configs.transformer import TransformerConfig
from megatron.training.check_rules import TRAINING_RULES

ALL = RULES + TRAINING_RULES
SIZES = {"num_layers": 4, "hidden_size": 96, "num_attention_heads": 6}
MOE = {**SIZES, "num_moe_experts": 8}
CP2 = {"context_parallel_size": 2, "attention_dropout": 0.0}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
VIOLATORS = {
    "pp": {**SIZES, "pipeline_model_parallel_size": 2},
    "vpp": {**SIZES, "virtual_pipeline_model_parallel_size": 2},
    "cp-attention-dropout": {**SIZES, **CP2, "attention_dropout": 0.1},
    "cp-comm-type-per-layer": {**SIZES, "cp_comm_type": ["p2p", "a2a"]},
    "cp-comm-type-hierarchical": {**SIZES, **CP2, "cp_comm_type": "a2a+p2p"},
    "cp-a2a-divides-heads": {**SIZES, **CP2, "cp_comm_type": "a2a", "num_query_groups": 3},
    "tp-divides-heads": {**SIZES, "num_query_groups": 2, "tensor_model_parallel_size": 4},
    "tp-divides-groups": {**SIZES, "num_query_groups": 3, "tensor_model_parallel_size": 2},
    "tp-divides-ffn": {**SIZES, "ffn_hidden_size": 99, "tensor_model_parallel_size": 2},
    "tp-divides-shared-experts": {
        **MOE,
        "moe_shared_expert_intermediate_size": 5,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "etp-divides-experts-ffn": {**MOE, "moe_ffn_hidden_size": 5, "expert_tensor_parallel_size": 2},
    "etp-without-experts": {**SIZES, "expert_tensor_parallel_size": 2},
    "ep-without-experts": {**SIZES, "expert_model_parallel_size": 2},
    "ep-divides-experts": {**MOE, "expert_model_parallel_size": 3},
    "moe-layer-pattern": {**MOE, "moe_layer_freq": [1, 0]},
    "moe-tp-needs-sp": {**MOE, "tensor_model_parallel_size": 2},
    "moe-bias-etp": {**MOE, "expert_tensor_parallel_size": 2},
    "overlap-needs-ep": {**MOE, "overlap_moe_expert_parallel_comm": True},
    "overlap-needs-chunks": {
        **MOE,
        "overlap_moe_expert_parallel_comm": True,
        "expert_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    },
    "overlap-needs-sms": {
        **MOE,
        "overlap_moe_expert_parallel_comm": True,
        "expert_model_parallel_size": 2,
        "moe_flex_dispatcher_num_sms": 65,
    },
    "delay_wgrad_compute-needs-overlap": {**MOE, "delay_wgrad_compute": True},
    "ep_overlap_early_attn_memory_release-needs-overlap": {**MOE, "ep_overlap_early_attn_memory_release": True},
    "high_priority_a2a_comm_stream-needs-overlap": {**MOE, "high_priority_a2a_comm_stream": True},
    "recompute-moe": {**SIZES, **SELECTIVE, "recompute_modules": ["core_attn", "moe"]},
    "recompute-moe_act": {**SIZES, **SELECTIVE, "recompute_modules": ["moe_act"]},
    "recompute-shared_experts": {**MOE, **SELECTIVE, "recompute_modules": ["shared_experts"]},
    "recompute-mlp": {**MOE, **SELECTIVE, "moe_layer_freq": 1, "recompute_modules": ["mlp"]},
    "distribute-saved-needs-tp": {**SIZES, **FULL, "distribute_saved_activations": True},
    "overlap-recompute-moe": {
        **MOE,
        "overlap_moe_expert_parallel_comm": True,
        "expert_model_parallel_size": 2,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
}


def test_ids_are_unique():
    assert len({rule.id for rule in ALL}) == len(ALL)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_row_gives_reason_and_remedy(rule):
    assert rule.why
    assert rule.remedy
    assert rule.feature
    assert not rule.remedy.endswith(".")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_row_is_violated_by_its_example_and_not_by_a_plain_model(rule):
    assert judge(TransformerConfig(**MOE), (rule,)) == []
    assert len(judge(TransformerConfig.draft(**VIOLATORS[rule.id]), (rule,))) == 1
