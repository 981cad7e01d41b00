"""The inputs of a captured step: buffers whose addresses never change, fed from the host without a wait.

    host      | fill pinned A |                    | fill pinned B |
    copy            | pinned A -> slot A |               | pinned B -> slot B |
    compute                        | slot A -> static | the step ............... | slot B -> static | the step ...

All tensors of all microbatches lie in one stretch of bytes, so that each arrow is one copy. The copy stream waits for
nothing but its own work: a slot, and the pinned buffer before it, are filled again two steps later, when the host has
read the result of the step that used them. `stage` enqueues all three arrows of B while the step of A runs, so that
between two steps nothing is left to do.

On a CPU the same buffers are filled by plain copies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Batch = Mapping[str, Any]
"""What the loader yields for one microbatch: tensors by name, and values that do not change."""

NUM_SLOTS = 2
_ALIGNMENT_BYTES = 256


def describe(value: Any) -> str:
    """Dtype and shape of a tensor [...], as errors show them; the value itself of anything else."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def signature(batches: Sequence[Batch]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """What must not change between a capture and its replays: names, dtypes, shapes, and values that are no tensors."""
    return tuple(tuple((name, describe(batch[name])) for name in sorted(batch)) for batch in batches)


class StaticInputs:
    """Buffers for the batches of one step, made for the first ones it sees."""

    def __init__(self, name: str, batches: Sequence[Batch], device: torch.device) -> None:
        """Allocate for batches like `batches`; `name` is that of the graph, for errors."""
        self.name = name
        self.device = device
        self._signature = signature(batches)
        places, num_bytes = _lay_out(batches)
        has_stream = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if has_stream else None
        self._pinned = [_bytes(num_bytes, torch.device("cpu"), has_stream) for _ in range(NUM_SLOTS)]
        self._slots = [_bytes(num_bytes, device, False) for _ in range(NUM_SLOTS)] if has_stream else self._pinned
        self._static = _bytes(num_bytes, device, False)
        self._views = [_view_batches(pinned, batches, places) for pinned in self._pinned]
        self.batches = _view_batches(self._static, batches, places)
        """What the captured step reads."""
        self._next = 0
        self._staged: Sequence[Batch] = ()
        """What the slot before `_next` holds for the coming step; nothing if empty."""

    def fits(self, batches: Sequence[Batch]) -> bool:
        """True if `batches` differ from the captured ones in their numbers only."""
        return signature(batches) == self._signature

    def check(self, batches: Sequence[Batch]) -> None:
        """Raise if `batches` differ from the captured ones in anything but their numbers."""
        found = signature(batches)
        if found == self._signature:
            return
        for captured, got in zip(self._signature, found, strict=True):
            before, now = dict(captured), dict(got)
            for key in sorted(before | now):
                if before.get(key) != now.get(key):
                    raise RuntimeError(
                        f"graph {self.name!r}, input {key!r}: captured {before.get(key, 'nothing of this name')}, got "
                        f"{now.get(key, 'nothing of this name')}; a captured step needs fixed shapes, pad the last "
                        "batch or run with --cuda-graph-impl none."
                    )

    def stage(self, batches: Sequence[Batch]) -> None:
        """Put the numbers of `batches`, which fit, where the captured step reads them, behind what is enqueued there.

        Host: no synchronisation, the step before may still run. Batches that `fill` is not given next are forgotten.
        """
        index, self._next = self._next, (self._next + 1) % NUM_SLOTS
        for views, batch in zip(self._views[index], batches, strict=True):
            for key, value in batch.items():
                if isinstance(value, torch.Tensor):
                    views[key].copy_(value)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._slots[index].copy_(self._pinned[index], non_blocking=True)
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._static.copy_(self._slots[index])
        self._staged = list(batches)

    def fill(self, batches: Sequence[Batch]) -> None:
        """Make sure that the numbers of `batches` are where the step reads them, in the order of the current stream.

        Host: no synchronisation.
        """
        if [id(batch) for batch in batches] != [id(batch) for batch in self._staged]:
            self.check(batches)
            self.stage(batches)
        self._staged = ()


def _lay_out(batches: Sequence[Batch]) -> tuple[list[dict[str, int]], int]:
    """The first byte of each tensor, and the bytes of all."""
    end = 0
    places = []
    for batch in batches:
        place = {}
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                place[key] = end
                end += -(-value.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        places.append(place)
    return places, end


def _bytes(count: int, device: torch.device, is_pinned: bool) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device, pin_memory=is_pinned)


def _view_batches(
    buffer: torch.Tensor, batches: Sequence[Batch], places: Sequence[Mapping[str, int]]
) -> list[dict[str, Any]]:
    """The batches again, each tensor as a view of `buffer` uint8 [bytes]."""
    viewed = []
    for batch, place in zip(batches, places, strict=True):
        views = dict(batch)
        for key, begin in place.items():
            stretch = buffer[begin : begin + batch[key].nbytes]
            views[key] = stretch.view(batch[key].dtype).view(batch[key].shape)
        viewed.append(views)
    return viewed
