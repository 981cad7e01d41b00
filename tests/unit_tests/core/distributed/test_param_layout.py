"""Offsets and buckets of a gradient buffer."""

from megatron.core.distributed.param_layout import (
    BucketLayout,
    bucket_alignment,
    default_bucket_size,
    plan_buffer,
    shard_range,
)


def test_parameters_lie_in_reverse_order_at_aligned_offsets():
    layout = plan_buffer([10, 100, 64], bucket_size=None)
    assert layout.offsets == (192, 64, 0)
    assert layout.buckets == (BucketLayout((2, 1, 0), 0, 256),)
    assert layout.num_elements == 256


def test_bucket_closes_with_the_parameter_that_fills_it():
    layout = plan_buffer([10, 100, 64], bucket_size=100)
    assert layout.buckets == (BucketLayout((2, 1), 0, 192), BucketLayout((0,), 192, 256))


def test_padding_is_not_counted_as_filling():
    layout = plan_buffer([1, 1, 1], bucket_size=3)
    assert [bucket.params for bucket in layout.buckets] == [(2, 1, 0)]


def test_buckets_end_at_multiples_of_the_alignment():
    layout = plan_buffer([10, 100], bucket_size=1, alignment=65536)
    assert layout.buckets == (BucketLayout((1,), 0, 65536), BucketLayout((0,), 65536, 131072))


def test_unit_keeps_its_order_and_its_bucket():
    """Parameters 1 and 3 are packed by a layer: equal distances, though 2 was registered between them."""
    layout = plan_buffer([10, 64, 5, 64, 30], bucket_size=1, units=[7, 8, 9, 8, 6])
    assert [bucket.params for bucket in layout.buckets] == [(4,), (2,), (1, 3), (0,)]
    assert (layout.offsets[1], layout.offsets[3]) == (128, 192)


def test_alignment_divides_buckets_into_aligned_shards():
    assert bucket_alignment(3, for_high_busbw=False) == 192
    assert bucket_alignment(3, for_high_busbw=True) == 196608
    assert shard_range(384, 2, 3) == (256, 384)


def test_no_parameters_need_no_memory():
    assert plan_buffer([], bucket_size=None).num_elements == 0


def test_default_bucket_grows_with_the_group():
    assert default_bucket_size(8) == 40_000_000
    assert default_bucket_size(64) == 64_000_000
