"""The memory of all graphs of a run, and of eager steps that stand in for one.

Graphs and stand-ins never run at the same time, so they share one pool: what one of them has freed, the next one uses.
A block of the pool belongs to the stream it was allocated on; so all of them run, or are captured, on one stream. The
eager steps before the first capture run on it too: the workspaces that libraries keep for a stream, and whatever else
is made once, then exist when the capture begins and are no part of the pool.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class GraphPool:
    """One pool and its stream, on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.id = torch.cuda.graph_pool_handle()
        self._has_blocks = False

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what is enqueued in the block. Other threads (loader, checkpoint writer) may go on meanwhile."""
        with torch.cuda.graph(graph, pool=self.id, stream=self.stream, capture_error_mode="thread_local"):
            yield
        self._has_blocks = True

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Run the block eagerly on the pool's stream and, while there is a captured graph, in its memory."""
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream):
            if not self._has_blocks:
                yield
            else:
                # torch's context manager for pools covers one thread; backward runs in another
                torch._C._cuda_beginAllocateToPool(self.device.index, self.id)
                try:
                    yield
                finally:
                    torch._C._cuda_endAllocateToPool(self.device.index, self.id)
                    torch._C._cuda_releasePool(self.device.index, self.id)
        outer.wait_stream(self.stream)

    def reserved_bytes(self) -> int:
        """Memory that the pool holds."""
        segments = torch.cuda.memory_snapshot(self.id)
        return sum(segment["total_size"] for segment in segments)
