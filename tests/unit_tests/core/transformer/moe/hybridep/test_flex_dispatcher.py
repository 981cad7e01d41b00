"""The flex dispatcher beside alltoall and fp64, and a layer with a row budget beside the same layer without one."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import build_dispatcher
from tests.common.moe_layers import ep_groups, moe_config, normal
from tests.common.poison import fresh_memory_poison

NUM_TOKENS, NUM_EXPERTS, TOPK = (33, 1, 0, 64), 8, 3


def problem(rank):
    """Hidden [T, 16], map and probs [T, 8], gradient [T, 16] of a rank, fp64 numbers that bf16 holds exactly."""
    num_tokens = NUM_TOKENS[rank]
    hidden, grad = (normal(num_tokens, 16, seed=seed + rank).bfloat16().double() for seed in (0, 10))
    likes = normal(num_tokens, NUM_EXPERTS, seed=20 + rank)
    routing_map = torch.zeros_like(likes, dtype=torch.bool).scatter_(1, likes.topk(TOPK).indices, True)
    probs = likes.sigmoid().float().double() * routing_map
    return hidden, routing_map, probs, grad


def scaled(rows, probs, counts, first):
    """Expert e multiplies its rows [P, h] by e + 1 and their probability [P]; rows [P, h] in the same dtype."""
    factors = torch.repeat_interleave(torch.arange(len(counts)) + first + 1.0, counts)
    return (rows * (factors * probs).unsqueeze(1)).to(rows.dtype)


def round_trip_job(name, dtype):
    """Output and gradients of hidden and probabilities."""
    config = moe_config(
        moe_token_dispatcher_type=name,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOPK,
        expert_model_parallel_size=dist.get_world_size(),
        params_dtype=dtype,
        moe_router_dtype="fp32",
    )
    dispatcher = build_dispatcher(config, ep_groups())
    hidden, routing_map, probs, grad = problem(dist.get_rank())
    hidden = hidden.to(dtype).requires_grad_()
    probs = probs.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    rows, row_probs, state = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs, state)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs, state)
    rows = scaled(rows, row_probs, counts, dispatcher.local_expert_indices[0])
    rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows, state), state)
    output = dispatcher.combine_postprocess(rows, state)
    output.backward(grad.to(dtype))
    return output.detach(), hidden.grad, probs.grad


def exact(rank):
    """The same by the formula, fp64, with the sum of magnitudes and the ranks that each token reaches."""
    hidden, routing_map, probs, grad = problem(rank)
    weights = probs * (torch.arange(NUM_EXPERTS) + 1.0)
    total = weights.sum(1, keepdim=True)
    grad_probs = routing_map * (torch.arange(NUM_EXPERTS) + 1.0) * (hidden * grad).sum(1, keepdim=True)
    hit = routing_map.view(-1, 4, NUM_EXPERTS // 4).any(2).sum(1, keepdim=True)
    return hidden * total, grad * total, grad_probs, hit


def test_fp32_is_alltoall_within_two_millionths(pool):
    flex, alltoall = (pool.run(round_trip_job, name, torch.float32, world_size=4) for name in ("flex", "alltoall"))
    for one, other in zip(flex, alltoall, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_fp64_is_the_formula(pool):
    for rank, found in enumerate(pool.run(round_trip_job, "flex", torch.float64, world_size=4)):
        for got, expected in zip(found, exact(rank), strict=False):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_bf16_is_within_a_rounding_for_each_rank_and_one(pool):
    for rank, found in enumerate(pool.run(round_trip_job, "flex", torch.bfloat16, world_size=4)):
        expected = exact(rank)
        for got, value in zip(found[:2], expected[:2], strict=True):
            assert ((got.double() - value).abs() <= (expected[3] + 1) * 2.0**-8 * value.abs()).all()
        assert found[2].dtype == torch.float32


def layer_job(is_grouped, factor):
    """Output and all gradients of a layer in which fresh memory is NaN."""
    config = moe_config(
        moe_token_dispatcher_type="flex",
        moe_grouped_gemm=is_grouped,
        params_dtype=torch.float32,
        expert_model_parallel_size=dist.get_world_size(),
        moe_expert_rank_capacity_factor=factor,
    )
    layer = MoELayer(config, layer_number=1, pg_collection=ep_groups())
    hidden = normal((7, 5)[dist.get_rank()], 1, 16, seed=dist.get_rank(), dtype=torch.float32).requires_grad_()
    with fresh_memory_poison():
        output, _ = layer(hidden)
        (output**2).sum().backward()
    return output.detach(), hidden.grad, {name: param.grad for name, param in layer.named_parameters()}


@pytest.mark.parametrize("is_grouped", [False, True], ids=["sequential", "grouped"])
def test_rows_behind_the_last_expert_reach_nothing(pool, is_grouped):
    exact_sizes, budget = (pool.run(layer_job, is_grouped, factor) for factor in (None, 4.0))
    for one, other in zip(exact_sizes, budget, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        assert all(torch.equal(grad, other[2][name]) and grad.isfinite().all() for name, grad in one[2].items())


def test_dropped_rows_add_nothing(pool):
    for output, grad, weights in pool.run(layer_job, True, 0.5):
        assert output.isfinite().all()
        assert grad.isfinite().all()
        assert all(one.isfinite().all() for one in weights.values())
