"""What every dispatcher of the registry must do, and what it says about itself."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.dispatchers import allgather, alltoall
from megatron.core.transformer.moe.token_dispatcher import (
    DISPATCHERS,
    MoETokenDispatcher,
    build_dispatcher,
    dispatcher_class,
)
from tests.common.collective_log import CollectiveLog
from tests.common.forced_router import all_to_experts, all_to_rank, forced_routing, spread_evenly
from tests.common.moe_layers import ep_groups, expected_scaling, moe_config, normal, scaling_layer

CAPACITY = {
    "dropless": {},
    "drop_probs": {"moe_expert_capacity_factor": 0.75},
    "drop_position": {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"},
    "pad": {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True},
}
READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


def config_for(name, ep_size, **fields):
    return moe_config(moe_token_dispatcher_type=name, expert_model_parallel_size=ep_size, **fields)


def round_trip(name, fields, tokens_per_rank, plan=None):
    """Largest errors of output, input gradient and router gradient against the closed form, on this rank."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    groups = ep_groups() if world > 1 else ProcessGroupCollection()
    layer = scaling_layer(config_for(name, world, **fields), groups).eval()
    hidden = normal(tokens_per_rank[rank], 1, 16, seed=rank + 1)
    grad = normal(tokens_per_rank[rank], 1, 16, seed=rank + 11)
    results = []
    with forced_routing(layer, plan) if plan else nullcontext() as forced:
        if forced is not None:
            forced.token_ids = torch.arange(len(hidden)) + 100 * rank
        for run in (lambda x: layer(x)[0], lambda x: expected_scaling(x, layer.router(x)[0])):
            x = hidden.clone().requires_grad_()
            layer.router.weight.grad = None
            out = run(x)
            out.backward(grad)
            results.append((out.detach(), x.grad, layer.router.weight.grad.clone()))
    return [(a - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("capacity", CAPACITY)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_round_trip_on_one_rank(name, capacity):
    assert max(round_trip(name, CAPACITY[capacity], [12])) < 1e-12


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("capacity", CAPACITY)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_round_trip_between_ranks(pool, name, capacity, world_size):
    errors = pool.run(round_trip, name, CAPACITY[capacity], [12] * world_size, world_size=world_size)
    assert max(max(rank) for rank in errors) < 1e-12


@pytest.mark.parametrize("capacity", ["dropless", "drop_probs", "pad"])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_round_trip_with_fused_permutation(pool, name, capacity):
    fields = CAPACITY[capacity] | {"moe_permute_fusion": True}
    assert max(max(rank) for rank in pool.run(round_trip, name, fields, [12, 12])) < 1e-12


@pytest.mark.parametrize("tokens", [[3, 5], [0, 5], [7, 0]], ids=str)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_ranks_may_bring_different_token_counts(pool, name, tokens):
    assert max(max(rank) for rank in pool.run(round_trip, name, {}, tokens)) < 1e-12


@pytest.mark.parametrize("plan", [all_to_rank(1, 2, 4, 2), all_to_experts((0, 3), 2)], ids=str)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_experts_and_ranks_may_receive_nothing(pool, name, plan):
    assert max(max(rank) for rank in pool.run(round_trip, name, {}, [6, 6], plan)) < 1e-12


@pytest.mark.parametrize("name", DISPATCHERS)
def test_padded_exchange_between_unequal_ranks_is_refused_on_both(pool, name):
    fields = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    with pytest.raises(AssertionError) as failure:
        pool.run(round_trip, name, fields, [3, 5], deadline_s=20.0)
    errors = failure.value.errors
    assert {error_type for error_type, _ in errors.values()} == {"ConfigError"}
    assert len(errors) == 2
    assert all(
        "moe_pad_expert_input_to_capacity=True with tokens per rank [3, 5]" in text for _, text in errors.values()
    )


def refuse_reads(monkeypatch):
    """Let every way of reading a tensor on the host fail."""
    for method in READS:

        def refuse(self, *args, _name=method, **kwargs):
            raise AssertionError(f"the host reads a tensor by {_name}")

        monkeypatch.setattr(torch.Tensor, method, refuse)


def phases(dispatcher, hidden, routing_map, probs):
    """Run all six phases with identity experts; returns what the traits speak about."""
    rows, row_probs, state = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    with CollectiveLog() as log:
        arrived, arrived_probs = dispatcher.token_dispatch(rows, row_probs, state)
    received = [rec.numels[0] for rec in log.records if rec.dtype in str(hidden.dtype)]
    expert_rows, _, expert_probs = dispatcher.dispatch_postprocess(arrived, arrived_probs, state)
    back = dispatcher.token_combine(dispatcher.combine_preprocess(expert_rows, state), state)
    dispatcher.combine_postprocess(back, state)
    return {
        "rows": len(expert_rows),
        "received": max(received, default=0) // hidden.shape[1],
        "aliases": expert_rows.untyped_storage().data_ptr() == arrived.untyped_storage().data_ptr(),
        "dtypes": {row_probs.dtype, arrived_probs.dtype, expert_probs.dtype},
    }


def two_routings(name, fields):
    """Traits, what happened with an even and with a lopsided routing, and whether the host read something."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    groups = ep_groups() if world > 1 else ProcessGroupCollection()
    layer = scaling_layer(config_for(name, world, moe_router_dtype="fp32", **fields), groups).eval()
    dispatcher, hidden, found = layer.token_dispatcher, normal(8, 1, 16), []
    for plan in (spread_evenly(4, 2), all_to_experts((0, 1), 2)):
        with forced_routing(layer, plan) as forced:
            forced.token_ids = torch.arange(8)
            probs, routing_map = layer.router(hidden)
        found.append(phases(dispatcher, hidden.flatten(0, 1), routing_map, probs.detach()))
    with pytest.MonkeyPatch.context() as patch:
        # a GPU skips the agreement for a token count it has seen
        patch.setattr(MoETokenDispatcher, "agree_on", lambda self, num_tokens, *args: num_tokens)
        refuse_reads(patch)
        try:
            rows, row_probs, state = dispatcher.dispatch_preprocess(hidden.flatten(0, 1), routing_map, probs.detach())
            dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, row_probs, state), state)
            is_read = False
        except AssertionError:
            is_read = True
        dist.barrier() if world > 1 else None
    return dispatcher.traits, found, is_read


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("capacity", CAPACITY)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_traits_are_true(pool, name, capacity, world_size):
    ranks = pool.run(two_routings, name, CAPACITY[capacity], world_size=world_size)
    for traits, (even, lopsided), is_read in ranks:
        assert traits.host_sync_free == (not is_read)
        assert {found["aliases"] for found in (even, lopsided) if found["rows"]} == {traits.postprocess_aliases_input}
        assert even["dtypes"] == {traits.probs_dtype} == {torch.float64}
        assert not traits.static_shapes or even["rows"] == lopsided["rows"]
        assert traits.postprocess_aliases_input or not traits.fuses_permute
        assert not traits.overlaps_shared_experts
        assert traits.supports_capacity


@pytest.mark.parametrize("name", DISPATCHERS)
def test_deduplication_is_true(pool, name):
    traits, (_, lopsided), _ = pool.run(two_routings, name, {}, world_size=2)[0]
    copies_of_a_token_for_both_experts_of_rank_0 = lopsided["received"] / (8 * 2)
    assert copies_of_a_token_for_both_experts_of_rank_0 == (1 if traits.deduplicates else 2)


@pytest.mark.parametrize(
    ("router_dtype", "params", "expected"),
    [(None, torch.bfloat16, torch.bfloat16), ("fp32", torch.bfloat16, torch.float32), ("fp64", None, torch.float64)],
)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_probs_dtype_is_the_routers(name, router_dtype, params, expected):
    config = config_for(name, 1, moe_router_dtype=router_dtype, params_dtype=params)
    traits = build_dispatcher(config, ProcessGroupCollection()).traits
    assert traits.probs_dtype == (torch.promote_types(expected, torch.float32) if traits.fuses_permute else expected)


def test_unknown_dispatcher_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"moe_token_dispatcher_type='carrier': .*allgather, alltoall"):
        dispatcher_class("carrier")


def test_classes_are_found_under_upstreams_path():
    from megatron.core.transformer.moe import token_dispatcher

    assert token_dispatcher.MoEAlltoAllTokenDispatcher is alltoall.MoEAlltoAllTokenDispatcher
    assert token_dispatcher.MoEAllGatherTokenDispatcher is allgather.MoEAllGatherTokenDispatcher
