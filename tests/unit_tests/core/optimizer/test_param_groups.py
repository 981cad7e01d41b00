"""Membership and order of parameter groups."""

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.param_groups import build_param_groups
from megatron.core.process_groups_config import ProcessGroupCollection


def parameter(*shape, **attributes):
    param = torch.nn.Parameter(torch.zeros(*shape))
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


def named():
    return [
        ("embedding.word_embeddings.weight", parameter(4, 2, is_embedding_or_output_parameter=True)),
        ("decoder.layers.0.input_layernorm.weight", parameter(2)),
        ("decoder.layers.0.self_attention.q_layernorm.weight", parameter(2)),
        ("decoder.layers.0.self_attention.linear_qkv.bias", parameter(1, 6)),
        ("decoder.layers.0.mlp.router.weight", parameter(2, 2)),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight0", parameter(2, 2, allreduce=False)),
        ("output_layer.weight", parameter(4, 2, is_embedding_or_output_parameter=True)),
    ]


def groups_of(config, params=None):
    return build_param_groups(named() if params is None else params, config, ProcessGroupCollection())


def test_biases_and_vectors_have_no_weight_decay():
    decayed_dense_last = groups_of(OptimizerConfig(lr=0.5, weight_decay=0.25))
    assert [(g["wd_mult"], g["is_expert_parallel"], g["lr"], g["weight_decay"]) for g in decayed_dense_last] == [
        (1.0, True, 0.5, 0.25),
        (1.0, False, 0.5, 0.25),
        (0.0, False, 0.5, 0.0),
    ]
    assert [g["names"] for g in decayed_dense_last] == [
        ["decoder.layers.0.mlp.experts.linear_fc1.weight0"],
        ["embedding.word_embeddings.weight", "decoder.layers.0.mlp.router.weight", "output_layer.weight"],
        [
            "decoder.layers.0.input_layernorm.weight",
            "decoder.layers.0.self_attention.q_layernorm.weight",
            "decoder.layers.0.self_attention.linear_qkv.bias",
        ],
    ]


def test_weight_decay_of_qk_norms_is_a_switch():
    decayed = groups_of(OptimizerConfig(apply_wd_to_qk_layernorm=True))[1]["names"]
    assert "decoder.layers.0.self_attention.q_layernorm.weight" in decayed
    assert "decoder.layers.0.input_layernorm.weight" not in decayed


def test_decoupled_rate_takes_embedding_and_output():
    config = OptimizerConfig(lr=0.5, min_lr=0.125, decoupled_lr=0.25)
    decoupled = [g for g in groups_of(config) if g["is_decoupled_lr"]]
    assert [g["names"] for g in decoupled] == [["embedding.word_embeddings.weight", "output_layer.weight"]]
    assert (decoupled[0]["lr"], decoupled[0]["max_lr"], decoupled[0]["min_lr"]) == (0.25, 0.25, 0.125)


def test_frozen_parameters_are_left_out():
    frozen = parameter(2, 2)
    frozen.requires_grad = False
    assert groups_of(OptimizerConfig(), [("a", frozen), ("b", parameter(2, 2))])[0]["names"] == ["b"]


def groups_where_ranks_own_different_kinds():
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    own = [("expert", parameter(2, 2, allreduce=False))] if dist.get_rank() == 0 else [("norm", parameter(2))]
    groups = build_param_groups(own, OptimizerConfig(), ProcessGroupCollection.use_mpu_process_groups())
    return [(g["wd_mult"], g["is_expert_parallel"], g["names"]) for g in groups]


def test_ranks_have_equal_lists_though_a_group_is_empty_locally(pool):
    first, second = pool.run(groups_where_ranks_own_different_kinds, world_size=2)
    assert first == [(1.0, True, ["expert"]), (0.0, False, [])]
    assert second == [(1.0, True, []), (0.0, False, ["norm"])]
