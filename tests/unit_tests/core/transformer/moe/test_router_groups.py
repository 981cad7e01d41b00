"""Balancing losses whose tokens are spread over ranks: the strength depends on no group size."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.aux_loss_scale import set_aux_loss_scale
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from tests.common.moe_layers import moe_config, normal

CELLS = [
    (kind, per_token, padded)
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
    for per_token in (False, True)
    for padded in (False, True)
]


def auxiliary_gradient(cell, axis, groups, rank, world):
    """Router gradient that this rank contributes for its part of 32 positions of 2 samples, 2 microbatches."""
    kind, per_token, padded = cell
    config = moe_config(
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=0.0 if kind == "none" else 0.01,
        moe_z_loss_coeff=0.1,
        calculate_per_token_loss=per_token,
    )
    router = TopKRouter(config, pg_collection=groups, layer_number=1)
    # what the schedule sets: loss_scale * CP / M, or loss_scale
    set_aux_loss_scale(1.0 if per_token else (world if axis == "cp" else 1) / 2)
    mask = torch.zeros(32, 2, dtype=torch.bool)
    mask[20:] = padded
    part = slice(rank * 32 // world, (rank + 1) * 32 // world)
    for seed in (1, 2):
        probs, _ = router(normal(32, 2, 16, seed=seed)[part], mask[part] if padded else None)
        (probs * 0.0).sum().backward()
    return router.weight.grad, router.step_counts(), router.metrics.sums


def all_cells(axis):
    world = dist.group.WORLD
    groups = ProcessGroupCollection(tp_cp=world, tp_dp_cp=world, **{axis: world})
    return {cell: auxiliary_gradient(cell, axis, groups, dist.get_rank(), dist.get_world_size()) for cell in CELLS}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_strength_does_not_depend_on_how_a_sample_is_split(pool, axis, world_size):
    ranks = pool.run(all_cells, axis, world_size=world_size)
    for cell in CELLS:
        expected, counts, sums = auxiliary_gradient(cell, "tp", ProcessGroupCollection(), 0, 1)
        total = sum(rank[cell][0] for rank in ranks)
        if axis == "cp" and not cell[1]:
            total = total / world_size  # gradients are averaged over DP * CP
        assert torch.allclose(total, expected, rtol=1e-9), cell
        assert torch.equal(sum(rank[cell][1] for rank in ranks), counts)
        losses = slice(0, 4)
        assert torch.allclose(sum(rank[cell][2] for rank in ranks)[losses], sums[losses], rtol=1e-5), cell


def global_loss_of_replicas():
    """Two data-parallel replicas with different tokens, and the gradient after averaging over them."""
    world = dist.group.WORLD
    groups = ProcessGroupCollection(dp=world, dp_cp=world, tp_dp_cp=world)
    config = moe_config(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.01)
    router = TopKRouter(config, pg_collection=groups, layer_number=1)
    set_aux_loss_scale(1.0)
    probs, _ = router(normal(16, 1, 16, seed=dist.get_rank()))
    (probs * 0.0).sum().backward()
    return router.weight.grad


def test_global_loss_counts_all_replicas_and_has_strength_one_over_dp(pool):
    ranks = pool.run(global_loss_of_replicas)
    weight = None
    config = moe_config(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01)
    router = TopKRouter(config, pg_collection=ProcessGroupCollection(), layer_number=1)
    set_aux_loss_scale(1.0)
    probs, _ = router(torch.cat([normal(16, 1, 16, seed=rank) for rank in (0, 1)]))
    (probs * 0.0).sum().backward()
    weight = router.weight
    assert torch.allclose(sum(ranks) / 2, weight.grad / 2, rtol=1e-9)
