"""Where each routed token goes: a stable counting sort by expert, with padding and a limit.

    ids   [C, K]   experts of each token, -1 = none        slots [C, K]  row of each choice, -1 = none or dropped
    t0    1 -1                                              t0   3 -1
    t1    0  1                        -->                   t1   0  4     pairs [P]  what each row holds: t * K + k
    t2    0 -1                                              t2   1 -1     (2, 4, -1 | 0, 3, -1), multiple of 3

Rows are ordered by expert, within an expert by token. Each expert's rows are padded to a multiple. If P is less than
what is needed, rows from P on are dropped: the last experts lose theirs, and their counts say so.

The kernels make two passes over blocks of tokens: count per expert, then rank within the block on top of what the
blocks and experts before need; in between, the counts of the blocks are added up. Sums of integers: both forms give the
same numbers.

The ids come from a routing map (`expert_slots`): for each token its experts in ascending order.

Legend: C tokens, K slots of a token, n experts, P rows, B blocks of tokens.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from dataclasses import dataclass

import torch

from megatron.core import streams
from megatron.core.optional_deps import is_available, tl, triton_jit

PADDING, TAIL = -1, -2
"""Marks in `pairs`: a row of zeros that pads its expert; a row behind the last expert's, which nobody reads."""

TILE = 8192
"""Entries of the table [tokens, experts] that one program holds."""

MARKED_ROWS = 1024
"""Rows that one program marks."""

PREFIX_COLUMNS, PREFIX_CHUNK = 8, 512
"""Experts and blocks of tokens that one program of `prefix_kernel` holds."""


@dataclass(frozen=True)
class Sizes:
    """What is asked of a layout."""

    num_rows: int
    """P"""

    multiple: int = 1
    """Each expert's rows are a multiple of this."""

    pads_empty: bool = False
    """An expert without tokens is padded too."""

    @property
    def has_padding(self) -> bool:
        """True if some row may be padding."""
        return self.multiple > 1 or self.pads_empty


@dataclass(frozen=True)
class RowLayout:
    """The rows of a routing, both ways round."""

    slots: torch.Tensor
    """int32 [C, K], row of each slot; -1 for an empty slot and for a dropped row."""

    pairs: torch.Tensor
    """int32 [P], the (token, slot) of each row as token * K + slot; PADDING and TAIL otherwise."""

    tokens_per_expert: torch.Tensor
    """int64 [n], rows of each expert, padding included, cut off at P."""

    dropped_rows: torch.Tensor
    """int64 [1], rows without padding that found no place."""

    has_tail: bool
    """False if all P rows belong to experts, which the host has to know."""

    has_padding: bool = True
    """False if no row is padding, which the host has to know."""

    @property
    def slots_per_token(self) -> int:
        """K"""
        return self.slots.shape[1]


def row_layout(
    ids: torch.Tensor,
    num_experts: int,
    num_rows: int,
    multiple: int = 1,
    *,
    has_tail: bool = False,
    pads_empty: bool = False,
) -> RowLayout:
    """Lay out the rows of expert ids int [C, K]; ids outside 0 .. n - 1 take none.

    `num_rows` is P: a budget if `has_tail`, else exactly the number of rows, padding included. With `pads_empty` an
    expert without tokens is padded as well.
    Host: no synchronisation. Graph: capturable.
    """
    if uses_kernels(ids):
        return kernel_layout(ids.contiguous(), num_experts, Sizes(num_rows, multiple, pads_empty), has_tail)
    return reference_layout(ids, num_experts, Sizes(num_rows, multiple, pads_empty), has_tail)


def expert_slots(routing_map: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Ids of the chosen columns: map bool [C, n], at most K true in a row -> int32 [C, K], ascending, -1 = none.

    Host: no synchronisation.
    """
    form = kernel_slots if uses_kernels(routing_map) else reference_slots
    return form(routing_map, num_slots)


def reference_slots(routing_map: torch.Tensor, num_slots: int) -> torch.Tensor:
    """The plain form of `expert_slots`: map bool [C, n] -> int32 [C, K]."""
    num_tokens, num_columns = routing_map.shape
    slots = torch.where(routing_map, routing_map.cumsum(dim=1) - 1, num_slots)  # [C, n], K is thrown away
    columns = torch.arange(num_columns, dtype=torch.int32, device=routing_map.device).expand(num_tokens, -1)
    ids = torch.full((num_tokens, num_slots + 1), -1, dtype=torch.int32, device=routing_map.device)
    return ids.scatter_(1, slots, columns)[:, :num_slots].contiguous()


def kernel_slots(routing_map: torch.Tensor, num_slots: int) -> torch.Tensor:
    """The form with a kernel: map bool [C, n] -> int32 [C, K]."""
    num_tokens, num_columns = routing_map.shape
    ids = torch.empty(num_tokens, num_slots, dtype=torch.int32, device=routing_map.device)
    width = max(16, 1 << (num_columns - 1).bit_length())
    block = max(8, TILE // width)
    if num_tokens:
        chosen = routing_map.contiguous().view(torch.uint8)
        shape = (num_tokens, num_columns, num_slots, block, width, 1 << (num_slots - 1).bit_length())
        streams.declare("slots", (routing_map,), (ids,))
        _slots_kernel[(-(-num_tokens // block),)](chosen, ids, *shape)
    return ids


def uses_kernels(tensor: torch.Tensor) -> bool:
    """True where kernels run: a tensor [any] on a GPU, and Triton is installed."""
    return tensor.is_cuda and is_available("triton")


def reference_layout(ids: torch.Tensor, num_experts: int, sizes: Sizes, has_tail: bool) -> RowLayout:
    """The plain form of `row_layout`: ids int [C, K]."""
    num_rows, flat = sizes.num_rows, ids.flatten().long()
    keys = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, keys, torch.ones_like(keys))
    starts, kept, dropped = _place(counts[:-1], sizes)
    order = keys.argsort(stable=True)  # positions in `flat`, sorted by expert, then token
    ranks = torch.arange(len(flat), device=ids.device) - (counts.cumsum(0) - counts)[keys[order]]
    first = torch.cat([starts, starts.new_full((1,), num_rows)])[keys[order]]
    rows = torch.where(keys[order] < num_experts, first + ranks, num_rows).clamp(max=num_rows)
    slots = torch.empty_like(flat).index_copy_(0, order, torch.where(rows < num_rows, rows, -1))
    pairs = torch.cat([_marks(kept, num_rows), flat.new_empty(1, dtype=torch.int32)])
    pairs = pairs.index_copy_(0, rows, order.int())[:num_rows]  # what has no row goes to the entry that is cut off
    return RowLayout(slots.view(ids.shape).int(), pairs, kept, dropped, has_tail, sizes.has_padding)


def _place(counts: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts int64 [n] -> first row of each expert [n], rows that it keeps with padding [n], dropped rows [1]."""
    num_rows, multiple = sizes.num_rows, sizes.multiple
    wanted = counts.clamp(min=1) if sizes.pads_empty else counts
    padded = (wanted + (multiple - 1)).div(multiple, rounding_mode="floor") * multiple
    ends = padded.cumsum(0)
    starts = ends - padded
    kept = ends.clamp(max=num_rows) - starts.clamp(max=num_rows)
    dropped = (counts - kept).clamp(min=0).sum(0, keepdim=True)
    return starts, kept, dropped


def _marks(kept: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The marks of a layout without pairs: counts int64 [n] -> int32 [P]."""
    rows = torch.arange(num_rows, device=kept.device)
    return torch.where(rows < kept.sum(), PADDING, TAIL).int()


def kernel_layout(ids: torch.Tensor, num_experts: int, sizes: Sizes, has_tail: bool) -> RowLayout:
    """The form with kernels: contiguous ids int [C, K]."""
    num_tokens, num_slots = ids.shape
    if not num_tokens:
        return reference_layout(ids, num_experts, sizes, has_tail)
    width = max(16, 1 << (num_experts - 1).bit_length())
    block = max(8, TILE // width)
    num_blocks = -(-num_tokens // block)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=ids.device)

    block_counts, before, counts = new(num_blocks, num_experts), new(num_blocks, num_experts), new(num_experts)
    kept, dropped = new(num_experts, dtype=torch.int64), new(1, dtype=torch.int64)
    slots, pairs = new(num_tokens, num_slots), new(sizes.num_rows)
    shape = (num_tokens, num_slots, num_experts, block, width)
    streams.declare("count rows", (ids,), (block_counts,))
    _count_kernel[(num_blocks,)](ids, block_counts, *shape)
    columns, chunk = min(PREFIX_COLUMNS, width), min(PREFIX_CHUNK, 1 << (num_blocks - 1).bit_length())
    streams.declare("sum counts", (block_counts,), (before, counts))
    prefix_kernel[(-(-num_experts // columns),)](block_counts, before, counts, num_blocks, num_experts, columns, chunk)
    asked = (sizes.num_rows, sizes.multiple, sizes.pads_empty)
    if sizes.has_padding or has_tail:
        num_chunks = -(-sizes.num_rows // MARKED_ROWS)
        streams.declare("mark rows", (counts,), (pairs,))
        _mark_kernel[(num_experts + num_chunks,)](counts, pairs, *asked, num_experts, MARKED_ROWS, width)
    streams.declare("place rows", (ids, before, counts), (slots, pairs, kept, dropped))
    _place_kernel[(num_blocks,)](ids, before, counts, slots, pairs, kept, dropped, *asked, *shape)
    return RowLayout(slots, pairs, kept, dropped, has_tail, sizes.has_padding)


@triton_jit
def _chosen(ids, tokens, num_tokens, num_slots: tl.constexpr, experts):
    """1 where a token [B] of ids [C, K] has an expert [n], else 0: int32 [B, n]."""
    chosen = tl.zeros([tokens.shape[0], experts.shape[0]], dtype=tl.int32)
    for slot in range(num_slots):
        picked = tl.load(ids + tokens.to(tl.int64) * num_slots + slot, mask=tokens < num_tokens, other=-1)
        chosen += (picked[:, None] == experts[None, :]).to(tl.int32)
    return chosen


@triton_jit(do_not_specialize=["num_tokens"])
def _count_kernel(
    ids,
    block_counts,
    num_tokens,
    num_slots: tl.constexpr,
    num_experts,
    block: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """How many tokens of a block chose each expert: ids [C, K] -> block counts [B, n]."""
    tokens, experts = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, width)
    counts = tl.sum(_chosen(ids, tokens, num_tokens, num_slots, experts), axis=0)
    tl.store(block_counts + tl.program_id(0) * num_experts + experts, counts, mask=experts < num_experts)


@triton_jit(do_not_specialize=["num_blocks"])
def prefix_kernel(
    block_counts,
    before,
    counts,
    num_blocks,
    num_experts: tl.constexpr,
    columns: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Add up block counts int32 [B, n], some experts to a program -> those of earlier blocks [B, n], of all [n]."""
    experts = tl.program_id(0) * columns + tl.arange(0, columns)
    total = tl.zeros([columns], dtype=tl.int32)
    for start in range(0, num_blocks, chunk):
        blocks = start + tl.arange(0, chunk)
        at = blocks[:, None] * num_experts + experts[None, :]
        is_real = (blocks < num_blocks)[:, None] & (experts < num_experts)[None, :]
        here = tl.load(block_counts + at, mask=is_real, other=0)
        tl.store(before + at, tl.cumsum(here, axis=0) - here + total[None, :], mask=is_real)
        total += tl.sum(here, axis=0)
    tl.store(counts + experts, total, mask=experts < num_experts)


@triton_jit
def _ranges(counts, experts, num_experts, multiple, pads_empty: tl.constexpr):
    """Rows of the experts, first row of each and first row behind its padding, int32 [n] each."""
    is_expert = experts < num_experts
    rows = tl.load(counts + experts, mask=is_expert, other=0)
    wanted = tl.where(is_expert, tl.maximum(rows, 1), 0) if pads_empty else rows
    padded = (wanted + multiple - 1) // multiple * multiple
    ends = tl.cumsum(padded, axis=0)
    return rows, ends - padded, ends


@triton_jit(do_not_specialize=["num_rows"])
def _mark_kernel(
    counts,
    pairs,
    num_rows,
    multiple: tl.constexpr,
    pads_empty: tl.constexpr,
    num_experts,
    chunk: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """The marks of the rows of pairs [P] that no choice takes: programs for experts, then for chunks of rows."""
    program, experts, row = tl.program_id(0), tl.arange(0, width), tl.arange(0, chunk)
    rows, starts, ends = _ranges(counts, experts, num_experts, multiple, pads_empty)
    if program < num_experts:
        begin = tl.sum(tl.where(experts == program, starts + rows, 0), axis=0)
        end = tl.minimum(tl.sum(tl.where(experts == program, ends, 0), axis=0), num_rows)
        for first in range(begin, end, chunk):
            tl.store(pairs + first + row, tl.full([chunk], -1, tl.int32), mask=first + row < end)
    else:
        row += (program - num_experts) * chunk
        is_tail = (row >= tl.max(ends, axis=0)) & (row < num_rows)
        tl.store(pairs + row, tl.full([chunk], -2, tl.int32), mask=is_tail)


@triton_jit(do_not_specialize=["num_rows", "num_tokens"])
def _place_kernel(
    ids,
    before,
    counts,
    slots,
    pairs,
    kept,
    dropped,
    num_rows,
    multiple: tl.constexpr,
    pads_empty: tl.constexpr,
    num_tokens,
    num_slots: tl.constexpr,
    num_experts,
    block: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Give each choice of a block of ids [C, K] its row -> slots [C, K], pairs [P]; the first program, kept [n] too."""
    program, experts = tl.program_id(0), tl.arange(0, width)
    tokens, is_expert = program * block + tl.arange(0, block), experts < num_experts
    rows, starts, ends = _ranges(counts, experts, num_experts, multiple, pads_empty)
    if program == 0:
        staying = tl.minimum(ends, num_rows) - tl.minimum(starts, num_rows)
        tl.store(kept + experts, staying.to(tl.int64), mask=is_expert)
        tl.store(dropped, tl.sum(tl.maximum(rows - staying, 0), axis=0).to(tl.int64))
    base = starts + tl.load(before + program * num_experts + experts, mask=is_expert, other=0)
    chosen = _chosen(ids, tokens, num_tokens, num_slots, experts)
    place = base[None, :] + tl.cumsum(chosen, axis=0) - chosen  # [block, width], right where `chosen`
    for slot in range(num_slots):
        at = tokens.to(tl.int64) * num_slots + slot
        picked = tl.load(ids + at, mask=tokens < num_tokens, other=-1)
        row = tl.sum(tl.where(picked[:, None] == experts[None, :], place, 0), axis=1)
        has_row = (picked >= 0) & (picked < num_experts) & (row < num_rows)
        tl.store(slots + at, tl.where(has_row, row, -1), mask=tokens < num_tokens)
        tl.store(pairs + row, at.to(tl.int32), mask=(tokens < num_tokens) & has_row)


@triton_jit
def _slots_kernel(
    routing_map,
    ids,
    num_tokens,
    num_columns,
    num_slots: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    slot_width: tl.constexpr,
) -> None:
    """One block of tokens: map uint8 [C, n] -> ids [C, K]."""
    tokens, columns = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, width)
    slots, is_token = tl.arange(0, slot_width), tokens < num_tokens
    first = tokens.to(tl.int64)[:, None]
    inside = is_token[:, None] & (columns < num_columns)[None, :]
    chosen = (tl.load(routing_map + first * num_columns + columns[None, :], mask=inside, other=0) != 0).to(tl.int32)
    slot = tl.cumsum(chosen, axis=1) - chosen
    found = tl.broadcast_to(columns[None, :], [block, width])
    tl.store(ids + first * num_slots + slot, found, mask=(chosen > 0) & (slot < num_slots))
    is_empty = (slots[None, :] >= tl.sum(chosen, axis=1)[:, None]) & (slots < num_slots)[None, :]
    nothing = tl.full([block, slot_width], -1, dtype=tl.int32)
    tl.store(ids + first * num_slots + slots[None, :], nothing, mask=is_empty & is_token[:, None])
