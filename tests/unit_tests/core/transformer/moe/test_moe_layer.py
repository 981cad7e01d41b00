"""The whole layer: stages, shared experts, expert parallelism against one rank, dtype of probabilities."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from tests.common.forced_router import all_to_rank, forced_routing
from tests.common.moe_layers import ep_groups, moe_config, normal, scaling_layer

SHARED = {"moe_shared_expert_intermediate_size": 20}


def layer(**fields):
    return MoELayer(moe_config(**fields), layer_number=1, pg_collection=ProcessGroupCollection())


def test_configuration_chooses_the_experts():
    assert isinstance(layer(moe_grouped_gemm=True).experts, GroupedMLP)
    assert isinstance(layer().experts, SequentialMLP)


def test_stages_in_line_are_the_forward_pass():
    module, hidden = layer(**SHARED), normal(3, 2, 16)
    rows, probs, shared, state = module.route_and_preprocess(hidden)
    rows, probs = module.dispatch(rows, probs, state)
    rows = module.combine(module.experts_compute(rows, probs, state), state)
    assert torch.equal(module.postprocess(rows, shared, state), module(hidden)[0])


def test_two_microbatches_in_flight_do_not_disturb_each_other():
    module = layer(moe_grouped_gemm=True)
    inputs = [normal(3, 2, 16, seed=1).requires_grad_(), normal(5, 1, 16, seed=2).requires_grad_()]
    expected = []
    for hidden in inputs:
        out, _ = module(hidden)
        expected += [out.detach(), *torch.autograd.grad(out.sum(), [hidden])]
    flights = [module.route_and_preprocess(hidden) for hidden in inputs]
    sent = [module.dispatch(rows, probs, state) for rows, probs, _, state in flights]
    made = [module.experts_compute(*pair, flight[3]) for pair, flight in zip(sent, flights, strict=True)]
    outs = [
        module.postprocess(module.combine(rows, state), None, state)
        for rows, (_, _, _, state) in zip(made, flights, strict=True)
    ]
    got = [part for out, x in zip(outs, inputs, strict=True) for part in (out, *torch.autograd.grad(out.sum(), [x]))]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_nothing_of_a_microbatch_stays_on_the_dispatcher():
    module = layer()
    before = {name: repr(value) for name, value in vars(module.token_dispatcher).items()}
    module(normal(3, 2, 16))
    assert {name: repr(value) for name, value in vars(module.token_dispatcher).items()} == before


def test_padding_mask_has_the_model_s_shape():
    padded, cropped, hidden = layer(), layer(), normal(7, 2, 16)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1] = True  # the whole second sample
    padded(hidden, mask)
    cropped(hidden[:, :1])
    assert padded.router.step_counts().tolist() == cropped.router.step_counts().tolist()


@pytest.mark.parametrize("gate", [False, True])
def test_shared_experts_add_one_gated_mlp(gate):
    module, hidden = layer(**SHARED, moe_shared_expert_gate=gate), normal(3, 2, 16)
    shared = module.shared_experts
    inner = hidden @ shared.linear_fc1.weight.t()
    expected = (F.silu(inner[..., :20]) * inner[..., 20:]) @ shared.linear_fc2.weight.t()
    if gate:
        expected = expected * torch.sigmoid(hidden @ shared.gate_weight.t())
    assert torch.allclose(shared(hidden), expected, rtol=1e-12)
    routed = module(hidden)[0] - expected
    module.shared_experts = None
    assert torch.allclose(routed, module(hidden)[0], rtol=1e-9, atol=1e-15)


def test_shared_experts_have_no_bias_even_if_others_do():
    config = moe_config(**SHARED, add_bias_linear=True)
    names = {name for name, _ in SharedExpertMLP(config, pg_collection=ProcessGroupCollection()).named_parameters()}
    assert names == {"linear_fc1.weight", "linear_fc2.weight"}
    assert config.add_bias_linear


NAMES = {
    *(f"experts.linear_fc{i}.weight{e}" for i in (1, 2) for e in range(4)),
    "router.weight",
    "shared_experts.linear_fc1.weight",
    "shared_experts.linear_fc2.weight",
    "shared_experts.gate_weight",
}


@pytest.mark.parametrize("grouped", [False, True])
def test_parameters_have_their_canonical_names(grouped):
    module = layer(moe_grouped_gemm=grouped, **SHARED, moe_shared_expert_gate=True)
    assert {name for name, _ in named_global_parameters(module)} == NAMES


def gradients(name, grouped, world, to_rank_0, groups):
    """One pass over this rank's part of 12 tokens; gradients by global name, input gradient, output."""
    rank = dist.get_rank() if world > 1 else 0
    config = moe_config(
        moe_token_dispatcher_type=name, moe_grouped_gemm=grouped, expert_model_parallel_size=world, **SHARED
    )
    module = MoELayer(config, layer_number=1, pg_collection=groups)
    part = slice(rank * 12 // world, (rank + 1) * 12 // world)
    hidden = normal(12, 1, 16)[part].clone().requires_grad_()
    with forced_routing(module, all_to_rank(0, 2, 4, 2)) as forced:
        forced.token_ids = torch.arange(12)[part]
        if not to_rank_0:
            module.router.select_experts = type(module.router).select_experts.__get__(module.router)
        out, _ = module(hidden)
    out.backward(normal(12, 1, 16, seed=1)[part])
    grads = {key: param.grad for key, param in named_global_parameters(module)}
    return grads, hidden.grad, out.detach()


def gradients_on_a_rank(name, grouped, world, to_rank_0):
    return gradients(name, grouped, world, to_rank_0, ep_groups())


@pytest.mark.parametrize("to_rank_0", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize("world", [2, 4])
def test_expert_parallelism_equals_one_rank(pool, name, grouped, world, to_rank_0):
    expected, hidden_grad, out = gradients("alltoall", False, 1, to_rank_0, ProcessGroupCollection())
    ranks = pool.run(gradients_on_a_rank, name, grouped, world, to_rank_0, world_size=world)
    assert torch.allclose(torch.cat([rank[2] for rank in ranks]), out, rtol=1e-11, atol=1e-15)
    assert torch.allclose(torch.cat([rank[1] for rank in ranks]), hidden_grad, rtol=1e-11, atol=1e-15)
    for key, wanted in expected.items():
        held = [grads[key] for grads, *_ in ranks if key in grads]
        assert len(held) == (1 if ".weight" in key and "shared" not in key and "router" not in key else world), key
        assert torch.allclose(sum(held), wanted, rtol=1e-11, atol=1e-15), key


def dtypes_on_the_way(name):
    """bf16 layer with an fp32 router and the same input on both ranks: dtypes of probabilities, output."""
    config = moe_config(
        moe_token_dispatcher_type=name,
        params_dtype=torch.bfloat16,
        moe_router_dtype="fp32",
        expert_model_parallel_size=2,
    )
    module = scaling_layer(config, ep_groups())
    hidden = normal(9, 1, 16, dtype=torch.bfloat16).requires_grad_()
    grads = []
    rows, probs, _, state = module.route_and_preprocess(hidden)
    probs.register_hook(lambda grad: grads.append(grad.dtype))
    arrived, arrived_probs = module.dispatch(rows, probs, state)
    out = module.postprocess(module.combine(module.experts_compute(arrived, arrived_probs, state), state), None, state)
    out.sum().backward()
    used = module.experts.seen[0][1]
    assert torch.isin(used, probs).all(), "a probability changed on the way"
    return [probs.dtype, arrived_probs.dtype, used.dtype, *grads], out.detach()


@pytest.mark.parametrize("name", ["alltoall", "allgather", "flex"])
def test_probabilities_stay_fp32_and_ranks_agree_bit_for_bit(pool, name):
    (dtypes, out), (other_dtypes, other_out) = pool.run(dtypes_on_the_way, name)
    assert dtypes == other_dtypes == [torch.float32] * 4
    assert torch.equal(out, other_out)
