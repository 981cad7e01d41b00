"""Memory that all ranks of a group can write: one buffer per rank, and on each rank the addresses of all of them.

    rank 0   [ buffer 0 ] <---.   .---> [ buffer 1 ]   rank 1
             [addr 0 | addr 1] \\ /     [addr 0 | addr 1]

`TorchSymmetricGroup` takes them from torch's symmetric memory: the ranks are processes, their GPUs are connected.
`LocalSymmetricGroup` is W ranks in one process, on one device: the buffers are slices of one tensor. Nothing above
knows the difference, so the logic between ranks runs on one GPU, or interpreted on a CPU. Local ranks work in
phases: a generator yields where its rank needs what the others send, and `run` lets all ranks reach that point before
any goes on. On a GPU each local rank has a stream of its own.

Legend: W ranks.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.core.utils.collectives import barrier
from megatron.core.utils.groups import group_size

TIMEOUT_S = 600.0
T = TypeVar("T")
Phases = Generator[None, None, T]
"""Work of one rank that yields wherever it depends on the other ranks."""


@dataclass(frozen=True)
class SymmetricBuffer:
    """The same number of bytes on every rank."""

    local: torch.Tensor
    """uint8 [num_bytes], this rank's buffer."""

    addresses: torch.Tensor
    """int64 [W] on the device, where each rank's buffer begins in this rank's address space."""

    handle: Any = None
    """What keeps the peers' memory mapped."""


class SymmetricGroup(abc.ABC):
    """W ranks that can write into each other's memory."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._rank, self._size, self.device = rank, size, device

    def rank(self) -> int:
        """Place of the caller."""
        return self._rank

    def size(self) -> int:
        """W"""
        return self._size

    @property
    def timeout_s(self) -> float:
        """How long a kernel may wait for a peer."""
        return TIMEOUT_S

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> SymmetricBuffer:
        """Buffers of zeros. Collective; no rank returns before all buffers are there."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until the devices of all ranks are idle. Collective."""


class TorchSymmetricGroup(SymmetricGroup):
    """Processes with a GPU each."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group.rank(), group.size(), device)
        self._group = group

    @property
    def timeout_s(self) -> float:
        """That of the group's collectives."""
        return self._group._get_backend(self.device).options._timeout.total_seconds()

    def allocate(self, num_bytes: int) -> SymmetricBuffer:
        import torch.distributed._symmetric_memory as symm_mem

        local = symm_mem.empty(num_bytes, dtype=torch.uint8, device=self.device)
        handle = symm_mem.rendezvous(local, self._group)
        local.zero_()
        self.synchronize()  # no peer may write before the zeros are there
        buffers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(self.size())]
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=self.device)
        return SymmetricBuffer(local, addresses, handle)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
        barrier(self._group)
        torch.cuda.synchronize(self.device)


class LocalRank(SymmetricGroup):
    """One of the ranks of a `LocalSymmetricGroup`; takes the place of its process group."""

    def __init__(self, rank: int, parent: LocalSymmetricGroup) -> None:
        super().__init__(rank, parent.size, parent.device)
        self.stream = torch.cuda.Stream(parent.device) if parent.device.type == "cuda" else None
        self._parent = parent
        self._allocated = itertools.count()

    def allocate(self, num_bytes: int) -> SymmetricBuffer:
        return self._parent.allocation(next(self._allocated), num_bytes, self.rank())

    def synchronize(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this rank's stream the current one."""
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield


class LocalSymmetricGroup:
    """W ranks in this process."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.device = torch.device(device)
        self.joins_phases = False
        """Let each phase begin only after all ranks' last one, as a captured graph needs: its branches may run one
        after the other, and one that waits for another could then wait for ever."""
        self._allocations: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ranks = [LocalRank(rank, self) for rank in range(size)]

    def allocation(self, index: int, num_bytes: int, rank: int) -> SymmetricBuffer:
        """The buffer of `rank` in the allocation of this index, which all ranks make in the same order."""
        if index == len(self._allocations):
            buffers = torch.zeros(self.size, num_bytes, dtype=torch.uint8, device=self.device)
            addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._allocations.append((buffers, addresses))
        buffers, addresses = self._allocations[index]
        assert buffers.shape[1] == num_bytes, f"rank {rank} allocates {num_bytes} bytes, others {buffers.shape[1]}"
        return SymmetricBuffer(buffers[rank], addresses)

    def run(self, phases: Sequence[Phases[T]]) -> list[T]:
        """Run the ranks' work phase by phase and return the results in the order of ranks.

        Stream: the ranks' own, which begin after the current one and are joined to it at the end.
        """
        results: dict[int, T] = {}
        self._fork()
        while len(results) < self.size:
            finished = len(results)
            if self.joins_phases:
                self._join()
                self._fork()
            for rank, phase in zip(self.ranks, phases, strict=True):
                with rank.as_current():
                    try:
                        next(phase)
                    except StopIteration as end:
                        results[rank.rank()] = end.value
            assert finished == len(results) or len(results) == self.size, "ranks differ in their number of phases"
        self._join()
        return [results[rank] for rank in range(self.size)]

    def _fork(self) -> None:
        for rank in self.ranks:
            if rank.stream is not None:
                rank.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _join(self) -> None:
        for rank in self.ranks:
            if rank.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(rank.stream)


def finish(phases: Phases[T]) -> T:
    """Run the work of one rank through; its peers run in their own processes."""
    while True:
        try:
            next(phases)
        except StopIteration as end:
            return end.value


def open_symmetric_group(group: Any) -> SymmetricGroup:
    """The symmetric group of a process group, of a local rank, or of one rank alone (None)."""
    if isinstance(group, SymmetricGroup):
        return group
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if group_size(group) == 1:
        return LocalSymmetricGroup(1, device).ranks[0]
    return TorchSymmetricGroup(group, device)
