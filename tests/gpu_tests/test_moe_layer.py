"""A MoE layer on a GPU against the same layer on the CPU, which starts from the same bits."""

import pytest
import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.forced_router import all_to_experts, forced_routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = (48, 2, 64)
ROUTERS = {
    "softmax": {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 1e-3},
    "sigmoid-bias-groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.01,
    },
    "capacity": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
}


def build_layer(device, **changes):
    settings = {
        "num_layers": 1,
        "hidden_size": SHAPE[-1],
        "num_attention_heads": 4,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 64,
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "device": device,
    }
    return MoELayer(TransformerConfig(**settings | changes), layer_number=1).to(device)


def run_layer(layer, device, dtype=torch.float32, plan=None):
    """Output and all gradients, on the CPU, of one forward and backward pass."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(SHAPE, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(SHAPE, generator=generator).to(device, dtype)
    if plan is None:
        output, _ = layer(hidden)
    else:
        with forced_routing(layer, plan) as forced:
            forced.token_ids = torch.arange(SHAPE[0] * SHAPE[1], device=device)
            output, _ = layer(hidden)
    (output * weight).sum().backward()
    grads = {name: param.grad for name, param in named_global_parameters(layer)}
    return {"output": output.detach().cpu(), "input": hidden.grad.cpu(), **{k: g.cpu() for k, g in grads.items()}}


def assert_close(expected, got, rtol):
    for name, tensor in expected.items():
        error = (tensor.double() - got[name].double()).norm() / tensor.double().norm().clamp(min=1e-12)
        assert error <= rtol, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("is_grouped", [True, False], ids=["grouped", "sequential"])
@pytest.mark.parametrize("router", ROUTERS)
def test_fp32_layer_equals_the_cpu(router, is_grouped):
    results = {
        device: run_layer(build_layer(device, moe_grouped_gemm=is_grouped, **ROUTERS[router]), device)
        for device in ("cpu", "cuda")
    }
    assert_close(results["cpu"], results["cuda"], rtol=1e-5)


def test_experts_without_tokens_get_zero_gradients():
    got = run_layer(build_layer("cuda"), "cuda", plan=all_to_experts((2, 5), topk=2))
    zero = {name for name, grad in got.items() if "experts" in name and not grad.any()}
    expected = {f"experts.linear_fc{fc}.weight{e}" for fc in (1, 2) for e in (0, 1, 3, 4, 6, 7)}
    assert zero == expected


def test_bf16_grouped_kernel_equals_sequential_experts():
    half = {"bf16": True, "params_dtype": torch.bfloat16}
    grouped, sequential = (
        run_layer(build_layer("cuda", moe_grouped_gemm=is_grouped, **half), "cuda", torch.bfloat16)
        for is_grouped in (True, False)
    )
    assert_close(sequential, grouped, rtol=2**-8)
