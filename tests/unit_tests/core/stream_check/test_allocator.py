"""The model of a caching allocator: last in, first out, for each stream and size."""

from megatron.core.stream_check.allocator import StreamOrderedAllocator


def test_block_freed_last_is_handed_out_first():
    allocator = StreamOrderedAllocator()
    first, second = allocator.allocate("a", 100), allocator.allocate("a", 100)
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate("a", 100) is second


def test_other_stream_or_size_gets_other_memory():
    allocator = StreamOrderedAllocator()
    block = allocator.allocate("a", 100)
    allocator.free(block)
    assert allocator.allocate("b", 100) is not block
    assert allocator.allocate("a", 1000) is not block


def test_sizes_of_one_granule_share_blocks():
    allocator = StreamOrderedAllocator()
    block = allocator.allocate("a", 1)
    allocator.free(block)
    assert allocator.free_blocks() == [block]
    assert allocator.allocate("a", 512) is block
    assert allocator.free_blocks() == []
