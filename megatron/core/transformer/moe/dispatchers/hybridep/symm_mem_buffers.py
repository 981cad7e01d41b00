"""What is where in the symmetric buffers of an engine, and how they grow.

    control   reports int32 [operations, W]            who has sent how much, see symm_mem_signals
              headers int32 [2, W, n + 1]              of each source: rows for each of our experts, its tokens
    data      two buffers in turn, each with a section of C tokens per peer:
              expert ids int32 [W, C, K]
              places     int32 [W, C, K]               which of its source's rows of that expert a row is
              probs      fp32  [W, C, K]               or their gradients
              rows             [W, C, h]

A section holds C tokens whatever their experts are, so that no routing can overflow it. C, K and the width of a row
grow when a call needs more; all ranks must ask for the same then, because the new buffers are made together.

Legend: W ranks, n experts on each, C tokens that a section holds, K slots of a token, h width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.transformer.moe.dispatchers.hybridep.metadata import round_up
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_group import SymmetricBuffer, SymmetricGroup
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_signals import Signals

ALIGNMENT_BYTES = 128
TOKEN_MULTIPLE = 64


@dataclass(frozen=True)
class Capacity:
    """How much a section holds."""

    tokens: int = 0
    """C"""

    slots: int = 0
    """K"""

    row_bytes: int = 0
    """Bytes of a row."""

    def joined(self, other: Capacity) -> Capacity:
        """The smallest capacity that covers both."""
        tokens = round_up(max(self.tokens, other.tokens), TOKEN_MULTIPLE)
        return Capacity(tokens, max(self.slots, other.slots), max(self.row_bytes, other.row_bytes))


@dataclass(frozen=True)
class Sections:
    """Byte offsets in a data buffer."""

    ids_at: int
    places_at: int
    probs_at: int
    rows_at: int
    num_bytes: int

    @classmethod
    def of(cls, capacity: Capacity, num_ranks: int) -> Sections:
        """Lay out the sections of all ranks one kind after the other."""
        per_slot = round_up(num_ranks * capacity.tokens * capacity.slots * 4, ALIGNMENT_BYTES)
        rows = round_up(num_ranks * capacity.tokens * capacity.row_bytes, ALIGNMENT_BYTES)
        return cls(0, per_slot, 2 * per_slot, 3 * per_slot, 3 * per_slot + rows)


class Mailbox:
    """The symmetric buffers of one rank."""

    def __init__(self, group: SymmetricGroup, num_local_experts: int) -> None:
        self.group = group
        self.signals = Signals(group)
        self.headers_at = self.signals.num_words
        """First word of the headers in the control buffer."""
        words = self.headers_at + 2 * group.size() * (num_local_experts + 1)
        self._control = group.allocate(round_up(words * 4, ALIGNMENT_BYTES))
        self.capacity = Capacity()
        self.sections = Sections.of(self.capacity, group.size())
        self._data: SymmetricBuffer | None = None
        self._in_graphs: list[SymmetricBuffer] = []

    @property
    def control(self) -> torch.Tensor:
        """int32 [words], this rank's control buffer."""
        return self._control.local.view(torch.int32)

    @property
    def control_addresses(self) -> torch.Tensor:
        """int64 [W]"""
        return self._control.addresses

    @property
    def data_addresses(self) -> torch.Tensor:
        """int64 [W]"""
        assert self._data is not None, "reserve() comes first"
        return self._data.addresses

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What lies on this rank and peers write into, uint8 [bytes] each, with the epoch int32 [1] that says where."""
        assert self._data is not None, "reserve() comes first"
        return self._control.local, self._data.local, self.signals.epoch

    def reserve(self, wanted: Capacity) -> None:
        """Make room. Collective if there is not enough, so all ranks ask for the same; not while a graph is captured.

        Host: waits for the devices of all ranks if the buffers grow, else not at all.
        """
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        joined = self.capacity.joined(wanted)
        if self._data is None or joined != self.capacity:
            assert not is_capturing, (
                f"{wanted} is more than {self.capacity}: buffers cannot grow while a graph is captured"
            )
            self.group.synchronize()
            self.capacity, self.sections = joined, Sections.of(joined, self.group.size())
            self._data = self.group.allocate(2 * max(self.sections.num_bytes, ALIGNMENT_BYTES))
        if is_capturing and self._data not in self._in_graphs:
            # A captured graph goes on using the buffers that it saw, on all ranks alike.
            self._in_graphs.append(self._data)
