"""Metadata of parameters."""

import pytest
import torch

from megatron.core.param_attrs import (
    InitSpec,
    ParamAttrs,
    awaits_init,
    mark_initialized,
    param_attrs,
    set_param_attrs,
)

ONES = InitSpec("ones")


def new_param(**attrs):
    return set_param_attrs(torch.nn.Parameter(torch.empty(4)), ParamAttrs(ONES, **attrs))


def test_plain_attributes_follow():
    param = new_param(partition_dim=0, num_parts=2, sequence_parallel=True, is_embedding_or_output=True)
    assert (param.tensor_model_parallel, param.partition_dim, param.partition_stride) == (True, 0, 2)
    assert (param.sequence_parallel, param.is_embedding_or_output_parameter, param.allreduce) == (True, True, True)


def test_replicated_parameter_has_upstreams_minus_one():
    param = new_param()
    assert (param.tensor_model_parallel, param.partition_dim) == (False, -1)


def test_expert_gradient_leaves_the_dense_groups_unless_told_otherwise():
    assert new_param(is_expert=True).allreduce is False
    same_groups = set_param_attrs(torch.nn.Parameter(torch.empty(1)), ParamAttrs(ONES, is_expert=True), allreduce=True)
    assert same_groups.allreduce is True


def test_second_setting_is_refused():
    with pytest.raises(AssertionError, match="already has attributes"):
        set_param_attrs(new_param(), ParamAttrs(ONES))


def test_foreign_parameter_is_named():
    with pytest.raises(AssertionError, match=r"\(3,\) has no attributes"):
        param_attrs(torch.nn.Parameter(torch.empty(3)))


def test_parameter_awaits_init_until_marked():
    param = new_param()
    assert awaits_init(param)
    mark_initialized(param)
    assert not awaits_init(param)


def test_custom_init_needs_its_function():
    with pytest.raises(ValueError, match="takes a function"):
        InitSpec("custom")
