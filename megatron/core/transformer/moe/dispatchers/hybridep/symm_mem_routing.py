"""Where each row goes, computed on the device from the routing of all ranks.

    sender     counts [W * n]   its rows of each expert
               places [T, K]    which of these rows a slot is: the number of earlier tokens with the same expert
    receiver   first row of source s in expert e = rows of the experts before e, padded + rows of the sources before s
               row of a slot                     = that + its place

So rows are ordered by expert, source, token, and no rank needs to see another's routing map to know its places.

Legend: T tokens of this rank, K slots of a token, W ranks, n experts on each, E = W * n, P rows at this rank's experts.
"""
# ruff: noqa: ANN001, ANN201, ANN202 (kernels)

import torch

from megatron.core import streams
from megatron.core.fusions.fused_row_layout import PREFIX_CHUNK, PREFIX_COLUMNS, prefix_kernel
from megatron.core.optional_deps import tl, triton_jit
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_launch import next_power_of_2

BLOCK_ELEMENTS = 8192


@triton_jit
def _chosen(expert_ids, tokens, num_tokens, experts, SLOTS: tl.constexpr):
    """1 where a token [B] of the block has an expert [E], else 0: int32 [B, E]."""
    chosen = tl.zeros([tokens.shape[0], experts.shape[0]], dtype=tl.int32)
    for slot in range(SLOTS):
        ids = tl.load(expert_ids + tokens.to(tl.int64) * SLOTS + slot, mask=tokens < num_tokens, other=-1)
        chosen += (ids[:, None] == experts[None, :]).to(tl.int32)
    return chosen


@triton_jit(do_not_specialize=["num_tokens"])
def count_kernel(
    expert_ids,  # int32 [T, K]
    block_counts,  # int32 [blocks, E]
    num_tokens,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the rows of each expert in a block of tokens. Grid: [blocks]."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    experts = tl.arange(0, EXPERTS_PAD)
    counts = tl.sum(_chosen(expert_ids, tokens, num_tokens, experts, SLOTS), axis=0)
    tl.store(block_counts + tl.program_id(0) * EXPERTS + experts, counts, mask=experts < EXPERTS)


@triton_jit(do_not_specialize=["num_tokens"])
def place_kernel(
    expert_ids,  # int32 [T, K]
    before,  # int32 [blocks, E], rows of each expert in earlier blocks
    places,  # int32 [T, K], left alone where there is no expert
    num_tokens,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Number the rows of each expert in the order of tokens. Grid: [blocks]."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    experts = tl.arange(0, EXPERTS_PAD)
    chosen = _chosen(expert_ids, tokens, num_tokens, experts, SLOTS)
    first = tl.load(before + tl.program_id(0) * EXPERTS + experts, mask=experts < EXPERTS, other=0)
    place = tl.cumsum(chosen, axis=0) - chosen + first[None, :]
    slot = tl.cumsum(chosen, axis=1) - chosen  # ids ascend, so that slots are in the order of experts
    tl.store(places + tokens.to(tl.int64)[:, None] * SLOTS + slot, place, mask=chosen > 0)


def number_rows(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 [T, K], ascending, -1 behind -> counts int32 [E], places int32 [T, K]. Host: no synchronisation."""
    num_tokens, num_slots = expert_ids.shape
    places = torch.empty_like(expert_ids)
    if num_tokens == 0:
        return torch.zeros(num_experts, dtype=torch.int32, device=expert_ids.device), places
    padded = next_power_of_2(num_experts)
    block = min(max(1, BLOCK_ELEMENTS // padded), next_power_of_2(num_tokens))
    num_blocks = -(-num_tokens // block)
    block_counts, before = (expert_ids.new_empty(num_blocks, num_experts) for _ in range(2))
    counts = expert_ids.new_empty(num_experts)
    sizes = (num_tokens, num_slots, num_experts, padded, block)
    streams.declare("count tokens", (expert_ids,), (block_counts,))
    count_kernel[(num_blocks,)](expert_ids, block_counts, *sizes)
    columns, chunk = min(PREFIX_COLUMNS, padded), min(PREFIX_CHUNK, next_power_of_2(num_blocks))
    streams.declare("sum counts", (block_counts,), (before, counts))
    prefix_kernel[(-(-num_experts // columns),)](block_counts, before, counts, num_blocks, num_experts, columns, chunk)
    streams.declare("place tokens", (expert_ids, before), (places,))
    place_kernel[(num_blocks,)](expert_ids, before, places, *sizes)
    return counts, places


@triton_jit(do_not_specialize=["budget"])
def arrange_kernel(
    headers,  # int32 [2, W, n + 1]
    epoch,  # int32 [1]
    firsts,  # int32 [W, n]
    group_ends,  # int32 [2, n]: end of each expert's rows, without and with padding
    tokens_per_expert,  # int64 [n]
    totals,  # int64 [3]: padded rows, dropped rows, tokens of the rank with most
    budget,
    MULTIPLE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
):
    """Lay out the rows of this rank's experts from the counts of all sources. Grid: [1]."""
    received = headers + ((tl.load(epoch) - 1) & 1) * SIZE * (EXPERTS + 1)
    sources, experts = tl.arange(0, SIZE_PAD), tl.arange(0, EXPERTS_PAD)
    is_real = (sources < SIZE)[:, None] & (experts < EXPERTS)[None, :]
    counts = tl.load(received + sources[:, None] * (EXPERTS + 1) + experts[None, :], mask=is_real, other=0)
    tokens = tl.load(received + sources * (EXPERTS + 1) + EXPERTS, mask=sources < SIZE, other=0)
    rows = tl.sum(counts, axis=0)
    padded = (rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    ends = tl.cumsum(padded, axis=0)
    begins = ends - padded
    first = begins[None, :] + tl.cumsum(counts, axis=0) - counts
    tl.store(firsts + sources[:, None] * EXPERTS + experts[None, :], first, mask=is_real)
    tl.store(group_ends + experts, begins + rows, mask=experts < EXPERTS)
    tl.store(group_ends + EXPERTS + experts, ends, mask=experts < EXPERTS)
    kept = tl.minimum(ends, budget) - tl.minimum(begins, budget)
    tl.store(tokens_per_expert + experts, kept.to(tl.int64), mask=experts < EXPERTS)
    dropped = rows - (tl.minimum(begins + rows, budget) - tl.minimum(begins, budget))
    tl.store(totals, tl.sum(padded, axis=0).to(tl.int64))
    tl.store(totals + 1, tl.sum(dropped, axis=0).to(tl.int64))
    tl.store(totals + 2, tl.max(tokens, axis=0).to(tl.int64))
