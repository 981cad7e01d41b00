"""Shards of a bucket, for all ranks at once."""

import pytest

from megatron.core.distributed.param_layout import bucket_alignment, plan_buffer
from megatron.core.optimizer.distrib_ranges import Part, parts_of_shard


def test_parameter_across_a_border_is_cut_there():
    offsets, numels = (0, 64), (10, 100)  # elements 0 to 9 and 64 to 163 of a bucket of 256
    assert parts_of_shard(offsets, numels, 256, 0, 2) == [Part(0, 0, 10, 0), Part(1, 0, 64, 64)]
    assert parts_of_shard(offsets, numels, 256, 1, 2) == [Part(1, 64, 100, 0)]


def test_one_rank_has_everything():
    assert parts_of_shard((64, 0), (3, 7), 128, 0, 1) == [Part(0, 0, 3, 64), Part(1, 0, 7, 0)]


def test_shard_of_padding_has_no_part():
    assert parts_of_shard((0,), (5,), 256, 3, 4) == []


NUMELS = (1, 63, 64, 65, 1000, 7, 4096, 129)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("bucket_size", [None, 1, 200])
def test_parts_of_all_ranks_tile_every_parameter(num_shards, bucket_size):
    layout = plan_buffer(NUMELS, bucket_size, bucket_alignment(num_shards, for_high_busbw=False))
    owned = {index: [] for index in range(len(NUMELS))}
    for bucket in layout.buckets:
        offsets = [layout.offsets[i] - bucket.start for i in bucket.params]
        numels = [NUMELS[i] for i in bucket.params]
        for rank in range(num_shards):
            for part in parts_of_shard(offsets, numels, bucket.end - bucket.start, rank, num_shards):
                owned[bucket.params[part.number]] += range(part.begin, part.end)
    assert owned == {index: list(range(numel)) for index, numel in enumerate(NUMELS)}


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_parts_begin_at_whole_vectors_of_their_parameter(num_shards):
    layout = plan_buffer(NUMELS, None, bucket_alignment(num_shards, for_high_busbw=False))
    numels = [NUMELS[i] for i in layout.buckets[0].params]
    offsets = [layout.offsets[i] for i in layout.buckets[0].params]
    for rank in range(num_shards):
        parts = parts_of_shard(offsets, numels, layout.num_elements, rank, num_shards)
        assert {part.begin % 64 for part in parts} <= {0}
