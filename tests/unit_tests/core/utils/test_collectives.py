"""Collectives over present and absent groups."""

import torch
import torch.distributed as dist

from megatron.core.utils import collectives


def reduce_scatter_and_gather():
    world = dist.group.WORLD
    rank = dist.get_rank()
    full = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (rank + 1)
    part = torch.empty(2)
    collectives.reduce_scatter(part, full, world)
    whole = torch.empty(4)
    collectives.all_gather(whole, part, world)
    value = torch.tensor([float(rank)])
    collectives.broadcast(value, world, group_src=1)
    return part.tolist(), whole.tolist(), value.item()


def test_two_ranks_reduce_scatter_then_gather(pool):
    first, second = pool.run(reduce_scatter_and_gather, world_size=2)
    assert first == ([3.0, 6.0], [3.0, 6.0, 9.0, 12.0], 1.0)
    assert second == ([9.0, 12.0], [3.0, 6.0, 9.0, 12.0], 1.0)


def test_none_is_a_group_of_one():
    source, target = torch.tensor([5.0]), torch.zeros(1)
    assert collectives.all_reduce(source, None) is None
    collectives.broadcast(source, None)
    collectives.reduce_scatter(target, source, None)
    assert target.item() == 5.0
    target.zero_()
    collectives.all_gather(target, source, None)
    assert target.item() == 5.0
