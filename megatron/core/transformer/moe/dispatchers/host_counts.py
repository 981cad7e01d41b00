"""Bringing counts to the host with a single wait, placed as late as the caller wants.

counts = HostCounts(device_tensor)     starts the copy, does not wait
...                                    enqueue work that does not need them
counts.wait()                          waits for the copy alone, not for the work enqueued since
"""

import torch


class HostCounts:
    """A device tensor int64 [m] on its way to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        """Start copying `values` int64 [m]."""
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[int]:
        """Wait for the copy, at most once, and return the counts."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host.tolist()
