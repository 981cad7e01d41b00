"""The kernels that move rows. See the timeline in symm_mem; what lies where in a buffer is in symm_mem_buffers.

    push     at the source: each token once to each rank that has an expert of it, with its slots
    expand   at the experts: each received token into the rows of its experts
    zero     at the experts: the padding between them
    reduce   at the experts: the rows of a token added up, one sum per token back to its source
    add      at the source: the sums of the ranks added up

Rows may be sent packed: codes and scales in place of elements, made by push and turned into elements again by expand,
which does both for the rows that a rank sends to itself.

    packed section   codes e4m3 uint8 [W, C, h] | scales fp32 [W, C, h / 128]

A kernel that writes to peers ends with `publish`; none waits. All loop over their items with a fixed number of blocks,
which is a knob, as these run beside matrix products that want the other multiprocessors. Offsets of rows have 64 bits.

Legend: T tokens of this rank, N tokens per source in the slot table, C tokens a section holds, K slots of a token,
h width, W ranks, n experts on each, P rows at this rank's experts.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (kernels)
from megatron.core.fusions.fp8_blocks import pack_blocks, unpack_blocks
from megatron.core.fusions.triton_casts import narrow
from megatron.core.optional_deps import tl, triton_jit
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_signals import publish


@triton_jit
def _at(addresses, peer, offset, dtype: tl.constexpr):
    """Pointer to what lies `offset` bytes, a multiple of 16, into the buffer of a peer; addresses int64 [W]."""
    address = tl.load(addresses + peer) + offset
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton_jit
def _outgoing(epoch, buffer_bytes):
    """Which of the two buffers the next message goes to, and where that begins."""
    parity = tl.load(epoch) & 1
    return parity, parity.to(tl.int64) * buffer_bytes


@triton_jit
def _incoming(epoch, buffer_bytes):
    """Which of the two buffers holds the last message, and where that begins."""
    parity = (tl.load(epoch) - 1) & 1
    return parity, parity.to(tl.int64) * buffer_bytes


@triton_jit
def _scales_at(rows_at, capacity, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Where the scales of packed rows begin: behind the codes of all sections."""
    return rows_at + tl.cast(capacity, tl.int64) * (SIZE * WIDTH)


@triton_jit(do_not_specialize=["num_tokens", "tokens_in_header", "rank", "capacity", "buffer_bytes"])
def push_kernel(
    hidden,  # [T, h]
    expert_ids,  # int32 [T, K]
    places,  # int32 [T, K]
    probs,  # fp32 [T, K]
    counts,  # int32 [W * n]
    num_tokens,
    tokens_in_header,
    control,  # int64 [W], addresses
    data,  # int64 [W], addresses
    epoch,  # int32 [1]
    rank,
    capacity,
    buffer_bytes,
    places_at,
    probs_at,
    rows_at,
    HEADERS_AT: tl.constexpr,
    OPERATION: tl.constexpr,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_ROUTING: tl.constexpr,
    PACKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store rows, and with routing the header and the slots, at all ranks that need them. Grid: [blocks]."""
    parity, buffer = _outgoing(epoch, buffer_bytes)
    is_first = tl.program_id(0) == 0
    if WITH_ROUTING and is_first:
        experts = tl.arange(0, EXPERTS_PAD)
        header_at = HEADERS_AT + (parity * SIZE + rank) * (EXPERTS + 1)
        for peer in range(SIZE):
            header = tl.load(control + peer).to(tl.pointer_type(tl.int32)) + header_at
            count = tl.load(counts + peer * EXPERTS + experts, mask=experts < EXPERTS)
            tl.store(header + experts, count, mask=experts < EXPERTS)
            tl.store(header + EXPERTS, tokens_in_header)
    slots = tl.arange(0, SLOTS_PAD)
    NUM_SCALES: tl.constexpr = (WIDTH + 127) // 128
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, TILE), tl.num_programs(0)):
        tokens = tile * TILE + tl.arange(0, TILE)
        is_token = tokens < num_tokens
        is_slot = is_token[:, None] & (slots < SLOTS)[None, :]
        of_slot = tokens.to(tl.int64)[:, None] * SLOTS + slots[None, :]
        ids = tl.load(expert_ids + of_slot, mask=is_slot, other=-1)
        destinations = tl.where(ids >= 0, ids // EXPERTS, -1)
        section = tl.zeros([TILE], dtype=tl.int64) + rank * capacity + tokens
        if WITH_ROUTING:
            place = tl.load(places + of_slot, mask=is_slot)
            prob = tl.load(probs + of_slot, mask=is_slot)
            to_slot = section[:, None] * SLOTS + slots[None, :]
            for peer in range(SIZE):
                tl.store(_at(data, peer, buffer, tl.int32) + to_slot, ids, mask=is_slot)
                tl.store(_at(data, peer, buffer + places_at, tl.int32) + to_slot, place, mask=is_slot)
                tl.store(_at(data, peer, buffer + probs_at, tl.float32) + to_slot, prob, mask=is_slot)
        for column in range(0, WIDTH, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            is_element = is_token[:, None] & (columns < WIDTH)[None, :]
            from_element = tokens.to(tl.int64)[:, None] * WIDTH + columns[None, :]
            row = tl.load(hidden + from_element, mask=is_element, other=0.0)
            if PACKED:
                blocks = tl.reshape(row.to(tl.float32), [TILE * BLOCK // 128, 128])
                codes, scales = pack_blocks(blocks, INTERPRETED)
                codes, scales = tl.reshape(codes, [TILE, BLOCK]), tl.reshape(scales, [TILE, BLOCK // 128])
                of_scale = column // 128 + tl.arange(0, BLOCK // 128)
                is_scale = is_token[:, None] & (of_scale < NUM_SCALES)[None, :]
                to_scale = section[:, None] * NUM_SCALES + of_scale[None, :]
            # The own rank reads `hidden` itself. The others in turn from the next one on, so that not all write to one.
            for step in range(1, SIZE):
                peer = (rank + step) % SIZE
                is_needed = tl.max((destinations == peer).to(tl.int32), axis=1) > 0
                to_element = section[:, None] * WIDTH + columns[None, :]
                if PACKED:
                    target = _at(data, peer, buffer + rows_at, tl.uint8)
                    tl.store(target + to_element, codes, mask=is_element & is_needed[:, None])
                    scales_at = _scales_at(rows_at, capacity, SIZE, WIDTH)
                    target = _at(data, peer, buffer + scales_at, tl.float32)
                    tl.store(target + to_scale, scales, mask=is_scale & is_needed[:, None])
                else:
                    target = _at(data, peer, buffer + rows_at, hidden.dtype.element_ty)
                    tl.store(target + to_element, row, mask=is_element & is_needed[:, None])
    publish(control, OPERATION, rank, SIZE)


@triton_jit
def _as_if_sent(pointers, mask, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Values fp32 [BLOCK] of elements of this rank after what they would have gone through on the way."""
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    codes, scales = pack_blocks(tl.reshape(values, [BLOCK // 128, 128]), INTERPRETED)
    return tl.reshape(unpack_blocks(codes, scales, INTERPRETED), [BLOCK])


@triton_jit
def _unpacked(pointers, mask, scales_at, num_scales, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Values fp32 [BLOCK] of codes that came with their scales."""
    blocks = tl.arange(0, BLOCK // 128)
    scales = tl.load(scales_at + blocks, mask=blocks < num_scales, other=1.0)
    codes = tl.load(pointers, mask=mask, other=0)
    return tl.reshape(unpack_blocks(tl.reshape(codes, [BLOCK // 128, 128]), scales, INTERPRETED), [BLOCK])


@triton_jit(do_not_specialize=["num_tokens", "num_rows", "rank", "capacity", "buffer_bytes"])
def expand_kernel(
    hidden,  # [T, h], what this rank sends to itself
    rows,  # [P, h]
    row_probs,  # fp32 [P]
    slot_rows,  # int32 [W, N, K]: row of each slot, -1 = not ours, -2 = dropped
    firsts,  # int32 [W, n]
    headers,  # int32 [2, W, n + 1]
    num_tokens,  # N
    num_rows,  # P
    data,  # int64 [W], addresses
    epoch,  # int32 [1]
    rank,
    capacity,
    buffer_bytes,
    places_at,
    probs_at,
    rows_at,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_ROUTING: tl.constexpr,
    PACKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Copy each token into its rows; with routing, find out first which these are, and keep that. Grid: [blocks]."""
    parity, buffer = _incoming(epoch, buffer_bytes)
    dtype: tl.constexpr = hidden.dtype.element_ty
    NUM_SCALES: tl.constexpr = (WIDTH + 127) // 128
    slots = tl.arange(0, SLOTS_PAD)
    received = _at(data, rank, buffer + rows_at, tl.uint8 if PACKED else dtype)
    received_scales = _at(data, rank, buffer + _scales_at(rows_at, capacity, SIZE, WIDTH), tl.float32)
    received_ids = _at(data, rank, buffer, tl.int32)
    received_places = _at(data, rank, buffer + places_at, tl.int32)
    received_probs = _at(data, rank, buffer + probs_at, tl.float32)
    for item in range(tl.program_id(0), SIZE * num_tokens, tl.num_programs(0)):
        token, source = item // SIZE, item % SIZE
        section = (source * capacity + token).to(tl.int64)
        of_slot = (source * num_tokens + token).to(tl.int64) * SLOTS + slots
        if WITH_ROUTING:
            is_token = token < tl.load(headers + (parity * SIZE + source) * (EXPERTS + 1) + EXPERTS)
            is_slot = is_token & (slots < SLOTS)
            at = section * SLOTS + slots
            ids = tl.load(received_ids + at, mask=is_slot, other=-1)
            is_ours = (ids >= rank * EXPERTS) & (ids < (rank + 1) * EXPERTS)
            first = tl.load(firsts + source * EXPERTS + ids - rank * EXPERTS, mask=is_ours, other=0)
            row = first + tl.load(received_places + at, mask=is_ours, other=0)
            row = tl.where(is_ours, tl.where(row < num_rows, row, -2), -1)
            tl.store(slot_rows + of_slot, row, mask=slots < SLOTS)
            prob = tl.load(received_probs + at, mask=row >= 0)
            tl.store(row_probs + row, prob, mask=row >= 0)
        else:
            row = tl.load(slot_rows + of_slot, mask=slots < SLOTS, other=-1)
        is_kept = tl.max(row, axis=0) >= 0
        is_own = source == rank
        for column in range(0, WIDTH, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            is_element = is_kept & (columns < WIDTH)
            near_at = hidden + tl.cast(token, tl.int64) * WIDTH + columns
            far_at = received + section * WIDTH + columns
            if PACKED:
                if is_own:
                    values = _as_if_sent(near_at, is_element, BLOCK, INTERPRETED)
                else:
                    scales_at = received_scales + section * NUM_SCALES + column // 128
                    num_scales = tl.where(is_kept, NUM_SCALES - column // 128, 0)
                    values = _unpacked(far_at, is_element, scales_at, num_scales, BLOCK, INTERPRETED)
                values = narrow(values, dtype, INTERPRETED)
            else:
                near = tl.load(near_at, mask=is_element & is_own)
                far = tl.load(far_at, mask=is_element & (source != rank))
                values = tl.where(is_own, near, far)
            for slot in range(SLOTS):
                target = tl.sum(tl.where(slots == slot, row, 0), axis=0).to(tl.int64)
                is_stored = is_element & (target >= 0)
                tl.store(rows + target * WIDTH + columns, values, mask=is_stored)


@triton_jit(do_not_specialize=["num_rows"])
def zero_kernel(
    rows,  # [P, h]
    row_probs,  # fp32 [P]
    group_ends,  # int32 [2, n]
    num_rows,  # P
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_PROBS: tl.constexpr,
):
    """Write zeros between the rows of an expert and those of the next. Grid: [n]."""
    expert = tl.program_id(0)
    begin = tl.load(group_ends + expert)
    end = tl.minimum(tl.load(group_ends + EXPERTS + expert), num_rows)
    for row in range(begin, end):
        for column in range(0, WIDTH, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], dtype=rows.dtype.element_ty)
            tl.store(rows + tl.cast(row, tl.int64) * WIDTH + columns, zeros, mask=columns < WIDTH)
        if WITH_PROBS:
            tl.store(row_probs + row, 0.0)


@triton_jit(do_not_specialize=["num_tokens", "rank", "capacity", "buffer_bytes"])
def reduce_kernel(
    rows,  # [P, h]
    row_probs,  # fp32 [P]
    slot_rows,  # int32 [W, N, K]
    num_tokens,  # N
    control,  # int64 [W], addresses
    data,  # int64 [W], addresses
    epoch,  # int32 [1]
    rank,
    capacity,
    buffer_bytes,
    probs_at,
    rows_at,
    OPERATION: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    WITH_PROBS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add up the rows of each token in the order of its experts, send sum and slot values home. Grid: [blocks]."""
    _, buffer = _outgoing(epoch, buffer_bytes)
    dtype: tl.constexpr = rows.dtype.element_ty
    slots = tl.arange(0, SLOTS_PAD)
    # Sources alternate, so that local reads and sends to all peers go on at the same time.
    for item in range(tl.program_id(0), SIZE * num_tokens, tl.num_programs(0)):
        token, source = item // SIZE, item % SIZE
        of_token = slot_rows + (source * num_tokens + token).to(tl.int64) * SLOTS
        row = tl.load(of_token + slots, mask=slots < SLOTS, other=-1)
        is_ours = tl.max((row != -1).to(tl.int32), axis=0) > 0
        section = (rank * capacity + token).to(tl.int64)
        target = _at(data, source, buffer + rows_at, dtype) + section * WIDTH
        for column in range(0, WIDTH, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], dtype=tl.float32)
            for slot in tl.range(0, SLOTS, loop_unroll_factor=UNROLL):
                at = tl.load(of_token + slot).to(tl.int64)
                is_read = (columns < WIDTH) & (at >= 0)
                values = tl.load(rows + at * WIDTH + columns, mask=is_read, other=0.0)
                total += values.to(tl.float32)
            tl.store(target + columns, narrow(total, dtype, INTERPRETED), mask=(columns < WIDTH) & is_ours)
        if WITH_PROBS:
            value = tl.load(row_probs + row, mask=row >= 0, other=0.0)
            home = _at(data, source, buffer + probs_at, tl.float32) + section * SLOTS
            tl.store(home + slots, value, mask=row != -1)
    publish(control, OPERATION, rank, SIZE)


@triton_jit(do_not_specialize=["num_tokens", "rank", "capacity", "buffer_bytes"])
def add_kernel(
    hidden,  # [T, h]
    probs,  # fp32 [T, K]
    expert_ids,  # int32 [T, K]
    num_tokens,  # T
    data,  # int64 [W], addresses
    epoch,  # int32 [1]
    rank,
    capacity,
    buffer_bytes,
    probs_at,
    rows_at,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_PROBS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add up what the ranks returned for each token, in the order of ranks. Grid: [blocks]."""
    _, buffer = _incoming(epoch, buffer_bytes)
    dtype: tl.constexpr = hidden.dtype.element_ty
    slots = tl.arange(0, SLOTS_PAD)
    returned = _at(data, rank, buffer + rows_at, dtype)
    returned_probs = _at(data, rank, buffer + probs_at, tl.float32)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        of_slot = tl.cast(token, tl.int64) * SLOTS + slots
        ids = tl.load(expert_ids + of_slot, mask=slots < SLOTS, other=-1)
        destinations = tl.where(ids >= 0, ids // EXPERTS, -1)
        for column in range(0, WIDTH, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], dtype=tl.float32)
            for peer in range(SIZE):
                has_sum = tl.max((destinations == peer).to(tl.int32), axis=0) > 0
                at = (peer * capacity + token).to(tl.int64)
                is_read = (columns < WIDTH) & has_sum
                values = tl.load(returned + at * WIDTH + columns, mask=is_read, other=0.0)
                total += values.to(tl.float32)
            narrowed = narrow(total, dtype, INTERPRETED)
            target = hidden + tl.cast(token, tl.int64) * WIDTH + columns
            tl.store(target, narrowed, mask=columns < WIDTH)
        if WITH_PROBS:
            at = (destinations * capacity + token).to(tl.int64) * SLOTS + slots
            value = tl.load(returned_probs + at, mask=ids >= 0, other=0.0)
            tl.store(probs + of_slot, value, mask=slots < SLOTS)
