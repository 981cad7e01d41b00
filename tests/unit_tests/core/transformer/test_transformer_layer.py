"""A layer and its stages."""

import pytest
import torch

from megatron.core.fusions import fused_rms_norm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.overlap.protocol import LayerCall
from megatron.core.tensor_parallel import random as rng
from megatron.core.transformer import TransformerLayer
from tests.common.mutants import replaced
from tests.common.small_models import SWIGLU, normal, small_config

MOE = {"num_moe_experts": 4, "moe_router_topk": 2, **SWIGLU}
X = normal(5, 2, 32)


def build(**fields):
    config = small_config(**fields)
    layer = TransformerLayer(config, get_gpt_layer_local_spec(config.num_moe_experts).submodules, layer_number=1)
    for seed, param in enumerate(layer.parameters()):
        param.data.add_(normal(*param.shape, seed=seed) * 0.3)
    return layer


def test_standalone_layer_returns_hidden_states_and_no_context():
    output, context = build()(X)
    assert output.shape == X.shape
    assert context is None


def test_dense_layer_is_two_residual_branches():
    layer = build()
    attended, attention_bias = layer.self_attention(layer.input_layernorm(X))
    middle = X + attended + attention_bias
    inner, mlp_bias = layer.mlp(layer.pre_mlp_layernorm(middle))
    torch.testing.assert_close(layer(X)[0], middle + inner + mlp_bias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fields", [{}, MOE, {**MOE, "moe_shared_expert_intermediate_size": 16}])
def test_forward_is_the_stages_in_line(fields):
    layer = build(**fields)
    call = LayerCall()
    rows, probs, residual, shared = layer.pre_dispatch(X, call)
    if layer.has_exchange:
        rows, probs = layer.dispatch(rows, probs, call)
        rows = layer.combine(layer.experts(rows, probs, call), call)
    assert torch.equal(layer.post(rows, residual, shared, call), layer(X)[0])
    assert layer.has_exchange == bool(fields)


def test_two_microbatches_may_be_inside_one_layer():
    layer, other = build(**MOE), normal(7, 1, 32, seed=3)
    expected = [layer(x)[0] for x in (X, other)]
    calls = [LayerCall(), LayerCall()]
    started = [layer.pre_dispatch(x, call) for x, call in zip((X, other), calls, strict=True)]
    sent = [layer.dispatch(s.rows, s.probs, call) for s, call in zip(started, calls, strict=True)]
    worked = [layer.experts(*rows, call) for rows, call in zip(sent, calls, strict=True)]
    back = [layer.combine(rows, call) for rows, call in zip(worked, calls, strict=True)]
    got = [layer.post(r, s.residual, s.shared_output, c) for r, s, c in zip(back, started, calls, strict=True)]
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_moe_layer_equals_its_mlp_called_whole():
    layer = build(**MOE)
    attended, _ = layer.self_attention(layer.input_layernorm(X))
    middle = X + attended
    mixed, _ = layer.mlp(layer.pre_mlp_layernorm(middle))
    torch.testing.assert_close(layer(X)[0], middle + mixed, rtol=1e-12, atol=1e-12)


def test_padding_mask_reaches_the_router():
    layer = build(**MOE, moe_aux_loss_coeff=0.1)
    seen = []
    router_forward = layer.mlp.router.forward
    layer.mlp.router.forward = lambda hidden, mask, _: (seen.append(mask), router_forward(hidden, mask))[1]
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    layer(X, padding_mask=padding)
    assert seen[0].shape == (5, 2)
    assert seen[0].nonzero().tolist() == [[3, 1], [4, 1]]


def test_fp32_residual_stream_under_bf16_weights():
    layer = build(bf16=True, fp32_residual_connection=True)
    output, _ = layer(X.bfloat16())
    assert output.dtype == torch.float32
    assert not torch.equal(output, output.bfloat16().float())


def test_hidden_dropout_acts_in_training_only():
    rng.reset()
    rng.model_parallel_cuda_manual_seed(1, device="cpu")
    layer = build(hidden_dropout=0.5)
    assert not torch.equal(layer(X)[0], layer(X)[0])
    layer.eval()
    assert torch.equal(layer(X)[0], layer(X)[0])
    rng.reset()


def layer_job(fields, is_fused):
    """Output and gradients of a layer, and how many sums its norms took over."""
    sums = []
    forward = fused_rms_norm.norm_forward

    def counted(x, residual, *rest):
        sums.append(residual is not None)
        return forward(x, residual, *rest)

    with (
        replaced(fused_rms_norm, "uses_kernels", lambda _: is_fused),
        replaced(fused_rms_norm, "norm_forward", counted),
    ):
        layer = build(params_dtype=torch.float32, normalization="RMSNorm", **fields)
        x = X.float().requires_grad_()
        output, _ = layer(x)
        (output * normal(*X.shape, seed=8).float()).sum().backward()
    return [output.detach(), x.grad, *(param.grad for param in layer.parameters())], sums


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {**MOE, "recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            [False, True, False, False],
        ),
        ({**SWIGLU, "layernorm_zero_centered_gamma": True}, [False, True]),
        ({"add_bias_linear": True}, [False, False]),
    ],
    ids=["experts", "dense", "bias"],
)
def test_norm_kernels_carry_the_residual_stream(interpreted, fields, expected):
    (fused, sums), (plain, _) = interpreted(layer_job, fields, True), interpreted(layer_job, fields, False)
    assert sums == expected
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
