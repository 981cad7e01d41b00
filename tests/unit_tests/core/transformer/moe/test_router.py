"""The router: gate, bias, counts, jitter, forced balance."""

import logging

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as rng
from megatron.core.transformer.moe.router import TopKRouter
from tests.common.moe_layers import moe_config, normal

SIGMOID_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def router(**fields):
    return TopKRouter(moe_config(**fields), pg_collection=ProcessGroupCollection(), layer_number=1)


@pytest.fixture
def seeded():
    rng.reset()
    rng.model_parallel_cuda_manual_seed(7, device="cpu", pg_collection=ProcessGroupCollection())
    yield
    rng.reset()


def test_sizes_of_the_result():
    probs, routing_map = router()(normal(5, 3, 16))
    assert probs.shape == routing_map.shape == (15, 4)
    assert routing_map.sum(dim=1).tolist() == [2] * 15


@pytest.mark.parametrize(
    ("router_dtype", "params", "expected"),
    [
        (None, torch.bfloat16, torch.bfloat16),
        ("fp32", torch.bfloat16, torch.float32),
        ("fp64", torch.float32, torch.float64),
        ("fp32", torch.float64, torch.float64),
    ],
)
def test_router_dtype_never_narrows(router_dtype, params, expected):
    module = router(moe_router_dtype=router_dtype, params_dtype=params)
    assert module(normal(4, 1, 16).to(params))[0].dtype == expected


def test_gate_in_fp32_reads_bf16_inputs_exactly():
    module = router(moe_router_dtype="fp32", params_dtype=torch.bfloat16)
    hidden = normal(64, 1, 16, dtype=torch.bfloat16)
    exact = hidden.double() @ module.weight.detach().double().t()
    assert torch.allclose(module.gate(hidden).double(), exact, rtol=1e-5, atol=1e-7)


def test_loss_reads_logits_and_not_probabilities():
    module, hidden = router(moe_aux_loss_coeff=0.01), normal(4, 2, 16)
    seen = []
    attach = module.balancer.attach_balancing_losses
    module.balancer.attach_balancing_losses = lambda probs, logits, *rest: (
        seen.append(logits),
        attach(probs, logits, *rest),
    )[1]
    module(hidden)
    assert torch.equal(seen[0], hidden @ module.weight.t())


def test_counts_are_exact_under_half_precision_and_decide_the_sign():
    module = router(**SIGMOID_BIAS, num_moe_experts=2, moe_router_topk=1).bfloat16()
    assert module.expert_bias.dtype == torch.float32
    assert module.step_counts().dtype == torch.int64
    for extra in range(64):
        counts = torch.tensor([608 + extra, 608 + extra + (2 if extra == 0 else 0)])
        width = int(counts.sum())
        rows = torch.zeros(width, 2, dtype=torch.bool)
        rows[: counts[0], 0] = True
        rows[counts[0] :, 1] = True
        module._count(rows, None)
    assert module.step_counts().tolist() == [40928, 40930]
    module.apply_step_counts(module.step_counts().clone())
    assert module.expert_bias.tolist() == pytest.approx([0.001, -0.001])
    assert module.step_counts().tolist() == [0, 0]


def test_half_precision_keeps_the_bits_and_the_address_of_the_bias():
    module = router(**SIGMOID_BIAS)
    module.expert_bias.copy_(torch.tensor([0.1, 1e-8, 3.0, -0.3]))
    before, address = module.expert_bias.tolist(), module.expert_bias.data_ptr()
    module.half()
    assert module.weight.dtype == torch.float16
    assert (module.expert_bias.tolist(), module.expert_bias.data_ptr()) == (before, address)


def test_bias_is_in_the_state_dict_and_counts_are_not():
    assert set(router(**SIGMOID_BIAS).state_dict()) == {"weight", "expert_bias"}
    assert set(router().state_dict()) == {"weight"}


def test_balanced_experts_keep_their_bias():
    module = router(**SIGMOID_BIAS)
    module.apply_step_counts(torch.tensor([5, 9, 1, 5]))
    assert module.expert_bias.tolist() == pytest.approx([0.0, -0.001, 0.001, 0.0])


def test_layers_update_independently_of_layers_without_bias():
    for fields in ([{}, SIGMOID_BIAS], [SIGMOID_BIAS, {}]):
        layers = [router(**entry) for entry in fields]
        for layer in layers:
            layer.apply_step_counts(torch.tensor([8, 0, 0, 0]))
        biases = [layer.expert_bias for layer in layers if layer.expert_bias is not None]
        assert [bias.tolist() for bias in biases] == [pytest.approx([-0.001, 0.001, 0.001, 0.001])]
        assert all(layer.step_counts().sum() == 0 for layer in layers)


def test_counts_are_those_of_the_dispatched_map():
    module = router(moe_expert_capacity_factor=0.5)
    _, routing_map = module(normal(8, 2, 16))
    assert module.step_counts().tolist() == routing_map.sum(dim=0).tolist()
    assert module.step_counts().max() == 4


def test_recompute_counts_and_attaches_once():
    module, hidden = router(moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.1), normal(8, 2, 16).requires_grad_()
    module(hidden)[0].sum().backward()
    plain = module.weight.grad.clone(), module.step_counts().clone(), module.metrics.sums.clone()
    again = router(moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.1)
    checkpoint(lambda x: again(x)[0], hidden, use_reentrant=True).sum().backward()
    assert torch.equal(again.weight.grad, plain[0])
    assert torch.equal(again.step_counts(), plain[1])
    assert torch.equal(again.metrics.sums, plain[2])


def test_jitter_multiplies_the_input_in_training_only():
    module, hidden = router(moe_input_jitter_eps=0.01), normal(64, 4, 16)
    ratio = module.apply_input_jitter(hidden) / hidden
    assert ratio.min() >= 0.99
    assert ratio.max() <= 1.01
    assert ratio.std() == pytest.approx(0.01 / 3**0.5, rel=0.1)
    assert module.eval().apply_input_jitter(hidden) is hidden


def test_forced_balance_replaces_logits_and_passes_the_gradient(seeded):
    module, hidden = router(moe_router_force_load_balancing=True, num_moe_experts=8), normal(512, 4, 16)
    before = torch.get_rng_state()
    probs, routing_map = module(hidden)
    assert torch.equal(torch.get_rng_state(), before)  # the expert-parallel state advances, not the default one
    load = routing_map.sum(dim=0)
    assert load.max() / load.double().mean() < 1.15
    probs[:, 0].sum().backward()
    assert module.weight.grad.abs().sum() > 0
    logits = torch.zeros(3, 1, 8, dtype=torch.float64, requires_grad=True)
    module.force_logits(logits).backward(normal(3, 1, 8, seed=4))
    assert torch.equal(logits.grad, normal(3, 1, 8, seed=4))


def test_forced_bias_is_shared_by_tokens_and_cached_if_negative(seeded):
    logits = torch.zeros(3, 2, 4, dtype=torch.float64)
    drawn = router(moe_router_force_biased=2.0)
    first, second = drawn.force_logits(logits), drawn.force_logits(logits)
    assert torch.equal(first, first[:1, :1].expand(3, 2, 4))
    assert not torch.equal(first, second)
    cached = router(moe_router_force_biased=-2.0)
    assert torch.equal(cached.force_logits(logits), cached.force_logits(logits))


def test_benchmark_modes_warn(seeded, caplog):
    with caplog.at_level(logging.WARNING, logger="megatron"):
        router(moe_router_force_load_balancing=True)
    assert "moe_router_force_load_balancing=True: tokens are routed at random" in caplog.text


def test_sinkhorn_is_used_in_training_and_plain_topk_in_evaluation():
    fields = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0, "moe_router_topk": 1}
    module = router(**fields)
    skewed = normal(64, 1, 4) + torch.tensor([4.0, 0.0, 0.0, 0.0])
    assert module.routing(skewed)[1].sum(dim=0).max() < 32
    assert module.eval().routing(skewed)[1].sum(dim=0)[0] > 50
