"""The all-to-all exchange under a row budget: the results of exact sizes, spare rows unread, overflows reported."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.step_guard import StepGuard, guarding
from megatron.core.transformer.moe.dispatchers.padded_alltoall import (
    compact_by_expert,
    fit_counts,
    order_slots,
    slots_per_pair,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.forced_router import all_to_rank, forced_routing
from tests.common.moe_layers import ep_groups, moe_config, normal
from tests.common.mutants import replaced

CPU = torch.device("cpu")
ROUTING = torch.tensor(  # 4 tokens, 4 experts on 2 ranks, top-2
    [[1, 1, 0, 0], [1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 0]], dtype=torch.bool
)


@pytest.mark.parametrize(
    ("factor", "most", "expected"),
    [(1.0, 99, 4), (1.2, 99, 5), (9.0, 6, 6), (0.001, 6, 1)],
)
def test_slots_are_the_balanced_share_times_the_factor(factor, most, expected):
    assert slots_per_pair(8, 2, factor, most) == expected


def test_pairs_lie_in_slots_by_rank_expert_and_token():
    order, wanted = order_slots(ROUTING, 2, num_ranks=2, num_slots=6)
    assert wanted.tolist() == [[3, 3], [0, 2]]
    assert order.token_of_slot[:6].tolist() == [0, 1, 3, 0, 2, 3]
    assert order.token_of_slot[6:8].tolist() == [1, 2]
    assert order.slots.tolist() == [[0, 3], [1, 6], [4, 7], [2, 5]]
    assert order.entry_of_slot[:6].tolist() == [0, 4, 12, 1, 9, 13]


def test_counts_end_where_the_slots_end():
    assert fit_counts(torch.tensor([[3, 3], [0, 2]]), 4).tolist() == [[3, 1], [0, 2]]
    assert fit_counts(torch.tensor([[3, 3], [0, 2]]), 2).tolist() == [[2, 0], [0, 2]]


def test_real_rows_come_first_by_expert_and_source():
    shuffle = compact_by_expert(torch.tensor([[2, 1], [0, 3], [1, 0]]), 4)
    assert shuffle.forward_ids[:7].tolist() == [0, 1, 8, 2, 4, 5, 6]
    places = shuffle.backward_ids
    assert [places[slot].item() for slot in (0, 1, 2, 4, 5, 6, 8)] == [0, 1, 3, 4, 5, 6, 2]


def layer_and_input(factor, tokens, **fields):
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    groups = ep_groups() if world > 1 else ProcessGroupCollection()
    config = moe_config(
        expert_model_parallel_size=world, moe_expert_rank_capacity_factor=factor, moe_grouped_gemm=True, **fields
    )
    layer = MoELayer(config, layer_number=1, pg_collection=groups)
    for number, param in enumerate(layer.parameters()):
        is_expert = not getattr(param, "allreduce", True)
        param.data = normal(*param.shape, seed=number + (100 * rank if is_expert else 0), dtype=param.dtype) * 0.3
    return layer, normal(tokens[rank], 1, 16, seed=rank + 1, dtype=config.params_dtype)


def outcome(layer, hidden, guard):
    """Output and all gradients of one pass, under a guard or with exact sizes."""
    layer.zero_grad()
    x = hidden.clone().requires_grad_()
    with nullcontext() if guard is None else guarding(guard):
        out, _ = layer(x)
        out.backward(normal(*out.shape, seed=7, dtype=out.dtype))
    return [out.detach(), x.grad, *(param.grad.clone() for param in layer.parameters())]


def compare_forms(factor, tokens, plan=None, **fields):
    """Whether the padded pass equals the exact one bit for bit, and the flags."""
    layer, hidden = layer_and_input(factor, tokens, **fields)
    guard = StepGuard(CPU, factor)
    with nullcontext() if plan is None else forced_routing(layer, plan) as forced:
        if forced is not None:
            forced.token_ids = torch.arange(len(hidden))
        exact = outcome(layer, hidden, None)
        padded = outcome(layer, hidden, guard)
    return [torch.equal(a, b) for a, b in zip(exact, padded, strict=True)], guard.flags.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_padded_exchange_gives_the_bits_of_the_exact_one(pool, world_size):
    for equal, flags in pool.run(compare_forms, 4.0, [6] * world_size, world_size=world_size):
        assert all(equal)
        assert flags[:2] == [0.0, 0.0]


@pytest.mark.parametrize("tokens", [[3, 5], [0, 5]], ids=str)
def test_ranks_may_bring_different_token_counts(pool, tokens):
    assert all(all(equal) for equal, _ in pool.run(compare_forms, 4.0, tokens, world_size=2))


def poisoned(factor, tokens):
    """The same with every row that no token fills made NaN, before and behind the experts, forward and backward."""
    layer, hidden = layer_and_input(factor, tokens)
    exact = outcome(layer, hidden, None)
    forward = layer.experts.forward

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, num_real):
            ctx.num_real = num_real
            rows = rows.clone()
            rows[num_real:] = float("nan")
            return rows

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            grad[ctx.num_real :] = float("nan")
            return grad, None

    def experts(rows, counts, probs, host=None):
        num_real = int(counts.sum())
        out, bias = forward(Poison.apply(rows, num_real), counts, Poison.apply(probs, num_real), host)
        return Poison.apply(out, num_real), bias

    with replaced(layer.experts, "forward", experts):
        padded = outcome(layer, hidden, StepGuard(CPU, factor))
    return [torch.equal(a, b) for a, b in zip(exact, padded, strict=True)]


def test_rows_that_no_token_fills_are_read_by_nobody(pool):
    assert all(all(equal) for equal in pool.run(poisoned, 4.0, [6, 6], world_size=2))


def test_overflow_is_reported_at_the_source_with_the_load(pool):
    # 8 tokens, top-2, all 16 rows of each rank go to rank 0: twice the balanced 8, in a budget of 12
    plan = all_to_rank(0, 2, 4, 2)
    ranks = pool.run(compare_forms, 1.5, [8, 8], plan, world_size=2)
    assert [flags for _, flags in ranks] == [[1.0, 0.0, 2.0]] * 2


def test_second_overflow_finds_the_same_budget(pool):
    assert pool.run(slots_twice, world_size=2) == [[(24, [1.0, 0.0, 2.0])] * 2] * 2


def slots_twice():
    layer, hidden = layer_and_input(1.5, [8, 8])
    found = []
    with forced_routing(layer, all_to_rank(0, 2, 4, 2)) as forced:
        for _ in range(2):
            forced.token_ids = torch.arange(8)
            guard = StepGuard(CPU, 1.5)
            with guarding(guard):
                rows, _, _, _ = layer.route_and_preprocess(hidden)
            found.append((len(rows), guard.flags.tolist()))
    return found


def test_without_a_guard_sizes_are_exact():
    layer, hidden = layer_and_input(1.5, [8])
    assert layer.token_dispatcher.traits.static_shapes
    rows, _, _, _ = layer.route_and_preprocess(hidden)
    assert len(rows) == 16
