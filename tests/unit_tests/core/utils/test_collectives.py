"""Collectives of groups that may be absent, and the note of the last one."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.utils import collectives
from megatron.core.utils.collectives import LastCollective, last_collective

PACKAGE = Path(collectives.__file__).parents[2]
DIRECT = re.compile(
    r"\bdist\.(all_reduce|all_gather\w*|all_to_all\w*|barrier|broadcast\w*|gather\w*|reduce\w*|scatter\w*|send|recv)\("
)


def test_no_other_file_communicates_by_itself():
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "collectives.py"]
    assert len(files) > 100
    assert [str(path) for path in files if DIRECT.search(path.read_text(encoding="utf-8"))] == []


def test_group_of_one_keeps_its_values_and_notes_nothing():
    last_collective.reset()
    source, output = torch.arange(4.0), torch.zeros(4)
    collectives.all_to_all(output, source, None)
    collectives.barrier(None)
    assert output.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert collectives.all_gather_object("a", None) == ["a"]
    assert collectives.gather_object("a", None) == ["a"]
    assert collectives.broadcast_object("a", None) == "a"
    assert collectives.scatter_object(["a"], None) == "a"
    assert (last_collective.operation, last_collective.count, last_collective.group) == ("none", 0, "none")


def on_two_ranks():
    group, rank = dist.new_group([0, 1], group_desc="ep"), dist.get_rank()
    last_collective.reset()
    received = torch.empty(3)
    counts = ([2, 1], [2, 1])[rank], ([2, 2], [1, 1])[rank]
    collectives.all_to_all(received, torch.full((sum(counts[1]),), float(rank)), group, *counts)
    noted = (last_collective.operation, last_collective.group, last_collective.count)
    world = collectives.world_group()
    objects = (
        collectives.all_gather_object(rank, world),
        collectives.broadcast_object(rank + 5, world),
        collectives.gather_object(rank, world),
        collectives.scatter_object([7, 8] if rank == 0 else [], world),
    )
    return received.tolist(), noted, objects, (last_collective.operation, last_collective.group, last_collective.count)


def test_two_ranks_exchange_and_note_operation_group_and_count(pool):
    first, second = pool.run(on_two_ranks, world_size=2)
    assert first == ([0.0, 0.0, 1.0], ("all_to_all", "ep", 1), ([0, 1], 5, [0, 1], 7), ("scatter_object", "world", 5))
    assert second == ([0.0, 0.0, 1.0], ("all_to_all", "ep", 1), ([0, 1], 5, [], 8), ("scatter_object", "world", 5))


def test_reset_forgets():
    note = LastCollective()
    note.note("barrier", None)
    note.reset()
    assert (note.operation, note.count) == ("none", 0)


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
