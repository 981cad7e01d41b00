"""Grouped and sequential experts: one meaning, one set of names."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.param_attrs import param_attrs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.expert_names import ExpertNumbering
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from tests.common.moe_layers import moe_config, normal

VARIANTS = {
    "swiglu": {},
    "geglu_bias": {"activation_func": F.gelu, "add_bias_linear": True},
    "gelu_bias": {"activation_func": F.gelu, "gated_linear_unit": False, "add_bias_linear": True},
    "probs_on_input": {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}
COUNTS = [3, 0, 4, 1]


def run(kind, fields, dtype=torch.float64, counts=COUNTS):
    module = kind(4, moe_config(params_dtype=dtype, **fields), pg_collection=ProcessGroupCollection())
    for i, (name, param) in enumerate(sorted(named_global_parameters(module))):
        if "bias" in name:
            param.data.copy_(normal(*param.shape, seed=i))
    rows = normal(sum(counts), 16, seed=1, dtype=dtype).requires_grad_()
    probs = normal(sum(counts), seed=2).abs().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    out, bias = module(rows, torch.tensor(counts), probs)
    assert bias is None
    out.backward(normal(*out.shape, seed=3, dtype=dtype))
    grads = {name: param.grad for name, param in named_global_parameters(module)}
    return module, out, rows, probs, grads


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_equals_sequential(variant, dtype):
    _, out, rows, probs, grads = run(GroupedMLP, VARIANTS[variant], dtype)
    _, expected_out, expected_rows, expected_probs, expected = run(SequentialMLP, VARIANTS[variant], dtype)
    assert sorted(grads) == sorted(expected)
    pairs = [(out, expected_out), (rows.grad, expected_rows.grad), (probs.grad, expected_probs.grad)]
    pairs += [(grads[name], expected[name]) for name in grads]
    # torch's gelu gives other last bits at other places of a tensor; SiLU without biases is equal bit for bit
    is_bitwise = "bias" not in variant
    for got, wanted in pairs:
        bound = 0.0 if is_bitwise else 8 * torch.finfo(dtype).eps * wanted.abs().max().item()
        assert (got - wanted).abs().max() <= bound


@pytest.mark.parametrize("kind", [GroupedMLP, SequentialMLP])
def test_output_is_that_of_the_formula(kind):
    module, out, rows, probs, _ = run(kind, VARIANTS["geglu_bias"])
    weights = dict(named_global_parameters(module))
    experts = [0, 0, 0, 2, 2, 2, 2, 3]
    for row, prob, expert, got in zip(rows, probs, experts, out, strict=True):
        inner = weights[f"linear_fc1.weight{expert}"] @ row + weights[f"linear_fc1.bias{expert}"]
        inner = F.gelu(inner[:24]) * inner[24:] * prob
        expected = weights[f"linear_fc2.weight{expert}"] @ inner + weights[f"linear_fc2.bias{expert}"] * prob
        assert torch.allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", [GroupedMLP, SequentialMLP])
def test_experts_without_rows_get_gradients_of_zeros(kind):
    *_, grads = run(kind, VARIANTS["geglu_bias"])
    assert all(grad.abs().sum() == 0 for name, grad in grads.items() if name.endswith("1"))
    assert all(grad.abs().sum() > 0 for name, grad in grads.items() if not name.endswith("1"))


@pytest.mark.parametrize("kind", [GroupedMLP, SequentialMLP])
def test_no_rows_at_all(kind):
    _, out, _, _, grads = run(kind, VARIANTS["geglu_bias"], counts=[0, 0, 0, 0])
    assert out.shape == (0, 16)
    assert all(grad.abs().sum() == 0 for grad in grads.values())


def test_both_start_from_the_same_weights():
    grouped, sequential = (
        dict(named_global_parameters(kind(4, moe_config(), pg_collection=ProcessGroupCollection())))
        for kind in (GroupedMLP, SequentialMLP)
    )
    assert grouped.keys() == sequential.keys()
    assert all(torch.equal(grouped[name], sequential[name]) for name in grouped)
    assert not torch.equal(grouped["linear_fc1.weight0"], grouped["linear_fc1.weight1"])


@pytest.mark.parametrize("kind", [GroupedMLP, SequentialMLP])
def test_parameters_say_what_they_are(kind):
    params = dict(named_global_parameters(kind(4, moe_config(), pg_collection=ProcessGroupCollection())))
    fc1, fc2 = param_attrs(params["linear_fc1.weight0"]), param_attrs(params["linear_fc2.weight0"])
    assert (fc1.partition_dim, fc1.num_parts, fc1.is_expert) == (0, 2, True)
    assert (fc2.partition_dim, fc2.num_parts, fc2.is_expert) == (1, 1, True)
    assert (fc1.init.std, fc2.init.std) == (0.02, 0.02 / 2**0.5)
    assert params["linear_fc1.weight0"].allreduce  # one rank: experts are reduced like dense parameters


def test_grouped_weights_stay_packed_through_conversion():
    module = GroupedMLP(4, moe_config(), pg_collection=ProcessGroupCollection()).bfloat16()
    weights = module.linear_fc1.weights
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert weights[1].data_ptr() - weights[0].data_ptr() == 48 * 16 * 2


def test_amaxes_of_an_expert_are_known_by_its_global_number():
    numbering = ExpertNumbering()
    numbering.num_local_experts, numbering.first_expert = 2, 2
    names = [f"local_experts.1.linear_fc1.{rest}" for rest in ("weight", "fp8.amax_history")]
    assert [numbering.global_name(name) for name in names] == [
        "linear_fc1.weight3",
        "local_experts.3.linear_fc1.fp8.amax_history",
    ]
