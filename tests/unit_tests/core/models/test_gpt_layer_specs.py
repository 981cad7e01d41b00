"""Which classes a layer is made of."""

import pytest

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.module_api.spec_utils import get_module
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from tests.common.small_models import SWIGLU, small_config


def kinds(**fields):
    spec = get_gpt_decoder_block_spec(small_config(**SWIGLU, **fields))
    return [layer.submodules.mlp.module for layer in spec.layer_specs]


def test_dense_model_has_dense_layers_whatever_the_frequency():
    assert kinds(num_layers=2) == [MLP, MLP]


def test_frequency_chooses_layers():
    assert kinds(num_layers=3, num_moe_experts=4, moe_layer_freq=2) == [MoELayer, MLP, MoELayer]
    assert kinds(num_layers=3, num_moe_experts=4, moe_layer_freq=[0, 1, 1]) == [MLP, MoELayer, MoELayer]


@pytest.mark.parametrize(("on", "expected"), [(True, WrappedTorchNorm), (False, IdentityOp)])
def test_head_norms_are_there_on_request(on, expected):
    assert get_gpt_layer_local_spec(qk_layernorm=on).submodules.self_attention.submodules.q_layernorm is expected


@pytest.mark.parametrize(("on", "expected"), [(True, GroupedMLP), (False, SequentialMLP)])
def test_layer_spec_chooses_the_experts(on, expected):
    assert get_module(get_gpt_layer_local_spec(4, moe_grouped_gemm=on).submodules.mlp.submodules.experts) is expected
