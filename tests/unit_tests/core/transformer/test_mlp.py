"""The MLP against its formula."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from tests.common.small_models import SWIGLU, normal, small_config


def squared_relu(x):
    return torch.relu(x) ** 2


def build(**fields):
    mlp = MLP(small_config(ffn_hidden_size=24, **fields), MLPSubmodules())
    for seed, param in enumerate(mlp.parameters()):
        param.data.copy_(normal(*param.shape, seed=seed) * 0.3)
    return mlp


X = normal(3, 2, 32)


@pytest.mark.parametrize("activation", [F.gelu, F.silu, squared_relu])
@pytest.mark.parametrize("bias", [False, True])
def test_plain_activations(activation, bias):
    mlp = build(activation_func=activation, add_bias_linear=bias)
    inner = X @ mlp.linear_fc1.weight.T + (mlp.linear_fc1.bias if bias else 0)
    output, output_bias = mlp(X)
    torch.testing.assert_close(output, activation(inner) @ mlp.linear_fc2.weight.T, rtol=1e-10, atol=1e-12)
    assert output_bias is (mlp.linear_fc2.bias if bias else None)


@pytest.mark.parametrize("bias", [False, True])
def test_gated_activation(bias):
    mlp = build(**{**SWIGLU, "add_bias_linear": bias})
    inner = X @ mlp.linear_fc1.weight.T + (mlp.linear_fc1.bias if bias else 0)
    gate, up = inner[..., :24], inner[..., 24:]
    expected = gate / (1 + torch.exp(-gate)) * up @ mlp.linear_fc2.weight.T
    torch.testing.assert_close(mlp(X)[0], expected, rtol=1e-10, atol=1e-12)
    assert mlp.linear_fc1.weight.partition_stride == 2


def test_gelu_fusion_is_the_tanh_form_behind_a_bias_and_exact_without():
    fused, exact = build(bias_activation_fusion=True), build(bias_activation_fusion=False)
    difference = (fused(X)[0] - exact(X)[0]).abs().max()
    assert 1e-8 < difference < 1e-2
    fused, exact = (build(bias_activation_fusion=on, add_bias_linear=False) for on in (True, False))
    assert torch.equal(fused(X)[0], exact(X)[0])


def test_token_scale_multiplies_the_inner_activation_and_the_output_bias():
    mlp, scale = build(activation_func=squared_relu), normal(6, seed=8)
    rows = X.flatten(0, 1)
    plain, bias = mlp(rows)
    output, output_bias = mlp(rows, scale)
    torch.testing.assert_close(output, (plain + bias) * scale[:, None], rtol=1e-10, atol=1e-12)
    assert output_bias is None


def test_token_scale_in_fp32_keeps_the_output_in_bf16():
    mlp = MLP(small_config(bf16=True, ffn_hidden_size=24), MLPSubmodules())
    assert mlp(X.flatten(0, 1).bfloat16(), normal(6).float())[0].dtype == torch.bfloat16


def test_expert_weights_leave_the_dense_groups():
    mlp = MLP(small_config(), MLPSubmodules(), is_expert=True)
    assert [param.allreduce for param in mlp.parameters()] == [False] * 4
