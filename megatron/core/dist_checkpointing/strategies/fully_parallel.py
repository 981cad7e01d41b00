"""A load in which every stored box is read by one rank alone and handed to the ranks that want parts of it.

    1. assign     from what all ranks want, each rank computes the same table: who reads which box. A reader wants part
                  of the box itself; boxes go, largest first, to the candidate with the fewest bytes
    2. read       each rank reads its next boxes whole, in the order of the files, about `ROUND_BYTES`
    3. exchange   one all-to-all of bytes, on the CPU if the group can; what arrives is copied into place; on with 2

So the files are read once whatever the number of replicas. Memory: on the CPU two to three times `ROUND_BYTES`, or the
largest box. Communication: the bytes that each rank does not read itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils.collectives import all_to_all
from megatron.core.utils.groups import group_rank

ROUND_BYTES = 64 * 2**20
_ALIGNMENT = 16

Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offset and shape of a box."""


@dataclass(frozen=True)
class Part:
    """What one rank wants of a stored box."""

    rank: int
    """who wants it"""
    number: int
    """which of that rank's tensors it belongs to"""
    in_stored: tuple[slice, ...]
    in_wanted: tuple[slice, ...]
    shape: tuple[int, ...]


@dataclass
class StoredBox:
    """A box in the files, and who wants parts of it."""

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file_position: tuple[str, int]
    parts: list[Part] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize

    def padded_bytes(self, part: Part) -> int:
        """Bytes that a part takes in a message: parts begin where any dtype may be viewed."""
        return -(-prod(part.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def place_of(tensor: ShardedTensor) -> Place:
    """What other ranks need to know of a wanted tensor [...]."""
    return tensor.key, tensor.global_offset, tensor.local_shape


def assign_readers(wanted: Sequence[Sequence[Place]], metadata: Metadata) -> list[list[StoredBox]]:
    """Step 1: for each rank the boxes it reads, in the order of the files. `wanted` lists each rank's tensors."""
    boxes = sorted(_stored_boxes(wanted, metadata), key=lambda box: (-box.nbytes, box.file_position))
    by_reader: list[list[StoredBox]] = [[] for _ in wanted]
    loads = [0] * len(wanted)
    for box in boxes:
        reader = min({part.rank for part in box.parts}, key=lambda rank: (loads[rank], rank))
        loads[reader] += box.nbytes
        by_reader[reader].append(box)
    return [sorted(boxes, key=lambda box: box.file_position) for boxes in by_reader]


def _stored_boxes(wanted: Sequence[Sequence[Place]], metadata: Metadata) -> Iterator[StoredBox]:
    """The boxes that somebody wants a part of."""
    by_key: dict[str, list[tuple[int, int, Place]]] = defaultdict(list)
    for rank, places in enumerate(wanted):
        for number, place in enumerate(places):
            by_key[place[0]].append((rank, number, place))
    positions: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {
        (index.fqn, tuple(index.offset or ())): (info.relative_path, info.offset)
        for index, info in metadata.storage_data.items()
    }
    for key, wants in by_key.items():
        stored = metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata), f"{key} is checked to be a tensor before"
        num_lead = _num_lead_axes(stored.chunks, wants)
        cells: dict[tuple[int, ...], list[tuple[int, int, Place]]] = defaultdict(list)
        for want in wants:
            cells[want[2][1][:num_lead]].append(want)
        for chunk in stored.chunks:
            offset, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            position = positions[key, offset]
            box = StoredBox(key, stored.properties.dtype, tuple(stored.size), offset, shape, position)
            for rank, number, place in cells.get(offset[:num_lead], ()):
                box.parts += _intersect(box, rank, number, place)
            if box.parts:
                yield box


def _num_lead_axes(chunks: Sequence[ChunkStorageMetadata], wants: Sequence[tuple[int, int, Place]]) -> int:
    """Leading axes, of layers and experts, along which every box is one wide: only equal offsets there can meet."""
    count = 0
    for sizes in zip(*(tuple(chunk.sizes) for chunk in chunks), *(place[2] for _, _, place in wants), strict=True):
        if set(sizes) != {1}:
            break
        count += 1
    return count


def _intersect(box: StoredBox, rank: int, number: int, place: Place) -> list[Part]:
    """The part of `box` that lies in the wanted place, if there is one."""
    in_stored, in_wanted, shape = [], [], []
    for begin, size, other_begin, other_size in zip(box.offset, box.shape, place[1], place[2], strict=True):
        first, last = max(begin, other_begin), min(begin + size, other_begin + other_size)
        if first >= last:
            return []
        in_stored.append(slice(first - begin, last - begin))
        in_wanted.append(slice(first - other_begin, last - other_begin))
        shape.append(last - first)
    return [Part(rank, number, tuple(in_stored), tuple(in_wanted), tuple(shape))]


def _rounds(boxes: Sequence[StoredBox]) -> Iterator[list[StoredBox]]:
    """Cut one reader's list into runs of at most `ROUND_BYTES`; a larger box is a run of its own."""
    run: list[StoredBox] = []
    for box in boxes:
        if run and sum(b.nbytes for b in run) + box.nbytes > ROUND_BYTES:
            yield run
            run = []
        run.append(box)
    if run:
        yield run


def exchange(
    by_reader: Sequence[Sequence[StoredBox]],
    tensors: Sequence[ShardedTensor],
    read: Callable[[Sequence[ShardedTensor]], None],
    group: dist.ProcessGroup | None,
) -> None:
    """Steps 2 and 3. `read` fills whole stored boxes from the files; `tensors` are filled in place.

    Every rank of `group` goes through the same number of rounds; `read` may raise only after the other ranks have heard
    of it.
    """
    rank = group_rank(group)
    for runs in zip_longest(*map(_rounds, by_reader), fillvalue=[]):
        # Step 2
        read_here = [
            ShardedTensor(box.key, torch.empty(box.shape, dtype=box.dtype), box.global_shape, box.offset)
            for box in runs[rank]
        ]
        read(read_here)
        # Step 3
        data_of = {id(box): tensor.data for box, tensor in zip(runs[rank], read_here, strict=True)}
        received = _swap(runs, data_of, group)
        for reader, run in enumerate(runs):
            position = 0
            for box, part in _parts_for(run, rank):
                if reader == rank:
                    values = data_of[id(box)][part.in_stored]
                else:
                    raw = received[reader][position : position + prod(part.shape) * box.dtype.itemsize]
                    values = raw.view(box.dtype).view(part.shape)
                    position += box.padded_bytes(part)
                tensors[part.number].view()[part.in_wanted].copy_(values)


def _parts_for(run: Sequence[StoredBox], rank: int) -> Iterator[tuple[StoredBox, Part]]:
    """What `rank` wants of a run, in the order in which it is sent."""
    return ((box, part) for box in run for part in box.parts if part.rank == rank)


def _swap(
    runs: Sequence[Sequence[StoredBox]], data_of: Mapping[int, Tensor], group: dist.ProcessGroup | None
) -> Sequence[Tensor]:
    """Send parts of this rank's boxes, `data_of` [...] by id, to the others; returns the bytes [n] from each."""
    rank = group_rank(group)
    pieces: list[Tensor] = []
    send_counts, recv_counts = [], []
    for other, run in enumerate(runs):
        going = [] if other == rank else list(_parts_for(runs[rank], other))
        coming = [] if other == rank else list(_parts_for(run, rank))
        send_counts.append(sum(box.padded_bytes(part) for box, part in going))
        recv_counts.append(sum(box.padded_bytes(part) for box, part in coming))
        for box, part in going:
            raw = data_of[id(box)][part.in_stored].contiguous().view(-1).view(torch.uint8)
            pieces += [raw, raw.new_zeros(box.padded_bytes(part) - raw.numel())]
    device = _message_device(group)
    sent = torch.cat([torch.empty(0, dtype=torch.uint8), *pieces]).to(device)
    received = torch.empty(sum(recv_counts), dtype=torch.uint8, device=device)
    all_to_all(received, sent, group, recv_counts, send_counts)
    return received.cpu().split(recv_counts)


def _message_device(group: dist.ProcessGroup | None) -> str:
    """The CPU, unless the group can only send from accelerators (--disable-gloo-process-groups)."""
    return "cpu" if group is None or "cpu:" in dist.get_backend_config(group) else "cuda"
