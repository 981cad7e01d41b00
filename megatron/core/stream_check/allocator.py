"""A model of a caching allocator: each stream has blocks of its own, and the one freed last is handed out first.

A freed block is free for its owner stream at once, since the device does the owner's work in order. Other streams may
still be using it: that is the fault that the checker looks for, and reuse makes visible whose memory is overwritten.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

BLOCK_BYTES = 512


@dataclass(eq=False)
class Block:
    """Memory of one size that belongs to one stream."""

    owner: Hashable
    """the stream that was current when it was first allocated"""
    num_bytes: int
    """its size, rounded up"""
    unfinished: list[Any] = field(default_factory=list)
    """uses that its owner was not behind when it was freed; whoever hands it out again has to judge them"""


class StreamOrderedAllocator:
    """Last in, first out, per owner stream and size."""

    def __init__(self) -> None:
        self._free: dict[tuple[Hashable, int], list[Block]] = {}

    def allocate(self, stream: Hashable, num_bytes: int) -> Block:
        """A block for `stream`: the one of this size that it freed last, else a new one."""
        size = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        free = self._free.get((stream, size))
        return free.pop() if free else Block(stream, size)

    def free(self, block: Block) -> None:
        """Give the block back to its owner."""
        self._free.setdefault((block.owner, block.num_bytes), []).append(block)

    def free_blocks(self) -> list[Block]:
        """Every block that nobody has."""
        return [block for blocks in self._free.values() for block in blocks]
