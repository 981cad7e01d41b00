"""How ranks tell each other that rows have arrived, on the device, without a host and without a collective.

Each operation of an engine is a message from every rank to every rank, also if it carries no rows:

    sender     stores into the receivers' buffers, barrier of the block, then each block adds 1 to its word at
               every receiver: an atomic with release order at system scope
    receiver   a kernel of its own, one program per peer, spins on its words with acquire order until all blocks of the
               peer have reported; the kernels behind it on the stream may read

A rank copies what it needs out of its buffer before its next message, so a peer that has received that message may
write there again. Hence a peer is at most one operation ahead, and two buffers that alternate suffice. Which one it is,
and how many reports are due, is counted in device memory by the waiting kernel: a replayed graph goes on counting.

A peer that does not report in time is written down where the host can read it (a pinned word per peer), and the kernel
traps: nothing that follows can run on rows that did not come.

Legend: W ranks.
"""
# ruff: noqa: ANN001, ANN201, ANN202 (kernels)

import torch

from megatron.core import streams
from megatron.core.errors import RankFailure
from megatron.core.fusions.triton_casts import is_interpreted
from megatron.core.optional_deps import tl, triton_jit
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_group import SymmetricGroup
from megatron.core.utils.collectives import device_waits

DISPATCH, COMBINE = 0, 1
OPERATION_NAMES = ("dispatch", "combine")

POLLS_PER_SECOND = 1_000_000
"""How often a program can look at its word; the time limit is counted in looks."""


@triton_jit
def publish(control, operation, rank, SIZE: tl.constexpr):
    """Report to all SIZE ranks, addresses `control` [W], that this block has stored all it has for them."""
    tl.debug_barrier()
    for peer in range(SIZE):
        words = tl.load(control + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_add(words + operation * SIZE + rank, 1, sem="release", scope="sys")


@triton_jit
def _trap(INTERPRETED: tl.constexpr):
    """End the kernel and all later work of the process on this device; interpreted, the host looks at the word."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("membar.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton_jit(do_not_specialize=["num_reports", "max_polls"])
def wait_kernel(
    arrived,  # int32 [W], reports of each peer for this operation
    expected,  # int32 [W], how many were due before this operation
    epoch,  # int32 [1], operations received so far
    failures,  # int32 [W] on the host
    num_reports,  # blocks of a peer's sending kernel
    operation,
    max_polls,
    INTERPRETED: tl.constexpr,
):
    """Wait for one peer. Grid: [W]."""
    peer = tl.program_id(0)
    due = tl.load(expected + peer) + num_reports
    polls = 0
    seen = tl.atomic_add(arrived + peer, 0, sem="acquire", scope="sys")
    while (seen - due < 0) & (polls < max_polls):  # the counters may wrap around, their difference may not
        seen = tl.atomic_add(arrived + peer, 0, sem="acquire", scope="sys")
        polls += 1
    if seen - due < 0:
        tl.store(failures + peer, operation + 1)
        _trap(INTERPRETED)
    tl.store(expected + peer, due)
    if peer == 0:
        tl.store(epoch, tl.load(epoch) + 1)


class Signals:
    """This rank's counters of messages."""

    def __init__(self, group: SymmetricGroup) -> None:
        size, device = group.size(), group.device
        self._group = group
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.expected = torch.zeros(len(OPERATION_NAMES), size, dtype=torch.int32, device=device)
        self.failures = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        device_waits.add(self)

    @property
    def num_words(self) -> int:
        """Words of int32 at the front of the control buffer: reports [operations, W]."""
        return self.expected.numel()

    def wait(self, control: torch.Tensor, operation: int, num_reports: int, timeout_s: float) -> None:
        """Enqueue the wait for all peers' message; `control` int32 [words] begins with this rank's reports."""
        size = self._group.size()
        max_polls = min(int(timeout_s * POLLS_PER_SECOND), 2**31 - 1)
        arrived = control[operation * size :]
        own = (self.expected, self.epoch, self.failures)
        streams.declare("wait for peers", (arrived, *own), own)
        wait_kernel[(size,)](
            arrived,
            self.expected[operation],
            self.epoch,
            self.failures,
            num_reports,
            operation,
            max_polls,
            is_interpreted(),
            num_warps=1,
        )
        if is_interpreted():
            self.raise_if_dead()

    def lost_peers(self) -> str:
        """Name the peers that a kernel has given up on; empty if there are none. Host: no synchronisation."""
        lost = [(peer, word - 1) for peer, word in enumerate(self.failures.tolist()) if word]
        if not lost:
            return ""
        names = ", ".join(f"rank {peer} in {OPERATION_NAMES[operation]}" for peer, operation in lost)
        return f"rank {self._group.rank()} of the expert ranks: no message in time from {names}"

    def raise_if_dead(self) -> None:
        """Raise RankFailure with the names of the peers that a kernel has given up on. Host: no synchronisation."""
        text = self.lost_peers()
        if text:
            raise RankFailure(f"{text}.")
