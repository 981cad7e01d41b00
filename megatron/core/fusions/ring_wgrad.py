"""The grouped weight gradient with warps that specialise: loads, products and additions run beside each other.

    main_grad[e][tile] += sum over the rows r of expert e of grad[r][outs]^T rows[r][ins]

The same sums as `grouped_wgrad` and, on codes, as `fp8_grouped_gemm.grouped_wgrad_product`; only for fp32 main
gradients on a Hopper GPU. A program walks over tiles of 128 x 128 (with two consumers 128 x 256) of all experts:

    producer, one warp          consumer, four warps
      wait empty[slot]            wait full[slot]
      TMA -> slot, full[slot]     products, 64 rows of the tile at a time, in order of the blocks
      ... blocks of a tile        arrive empty[slot] once its products ended
      ... then its old values     add them to the finished sums, store; meanwhile blocks of the next tile arrive

Slots form a ring. What a tile is added to comes through it as well, in two pieces of 64 x 128 for each consumer: it is
read from memory while products run. A second program on the same SM (or the second consumer) multiplies while the
first one adds.

Why no barrier can be waited for in vain. Producer and consumers walk over the same list of fills: the blocks of each
tile, then its pieces, counted by `count` from 0; fill number c takes slot c mod SLOTS, for the (c div SLOTS)-th time.
Every consumer waits for every fill and arrives once for it, also for pieces that are another one's. So:

    full[slot]   one arrival a fill (the producer's, with the bytes that TMA will bring): its phase k ends when the
                 slot was filled for the k-th time. A consumer waits for parity k mod 2. It cannot be misled by phase
                 k - 2: before, it waited for phase k - 1 of the same slot. Nor by phase k + 2: the producer fills a
                 slot only after this consumer's own arrival for the fill before.
    empty[slot]  one arrival of each consumer a fill: its phase k ends when fill k was used up. The producer waits for
                 phase k - 1 before fill k, that is for parity (k - 1) mod 2; for k = 0 that is the phase "before the
                 first", which counts as ended. It waits for each phase in order, hence cannot be misled either.

The oldest fill that is not used up needs only earlier ones: someone can always go on. An expert without rows has no
fills, and its tiles are not touched. Group ends are read on the device, by each warp for itself.

TMA sees windows of rows, as in `grouped_wgrad`: the last block of a group has zeros in front. Columns of codes lie in
windows that begin every 16 columns, which is where experts begin.

Sums are in fp32. bf16 and fp16: in the tensor core, with the bits of `grouped_wgrad`. Codes: partial sums of 128
products are added to fp32 registers, and the scales of lines applied to the finished sum.

Legend: R rows, n experts, out and in features.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but gl.constexpr)
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.triton_casts import is_interpreted
from megatron.core.optional_deps import gl, gluon_jit, hopper, is_available, require

REGISTERS = {1: 128, 2: 168}
"""Of a thread at the launch, by consumers; the producer's warps give theirs away."""
_SIDE = 128
_HALF = 64
_ALIGNMENT_BYTES = 16  # of addresses and strides that TMA takes
_BLOCK_BYTES = 128  # of a row in a slot: 64 numbers of bf16, 128 codes
_WINDOW_STEP = 16
_NUM_TURNS = 8
_PRODUCT_NS, _CODE_NS, _SUM_NS = 0.4e-3, 0.2e-3, 0.12
"""What an SM takes for an element of a tile: a row's product, a product of codes, and the addition to memory."""


@dataclass(frozen=True)
class RingCut:
    """How the kernel is cut; changes speed, not results."""

    consumers: int = 1
    """1: tiles of 128 x 128, two programs on an SM. 2: tiles of 128 x 256, one program on an SM."""
    slots: int = 3
    """of 32 KiB, with two consumers of 48 KiB"""
    band: int = 8
    """tiles along out that are walked before the next tile along in"""


# From `tools/benchmark/wgrad_sweep.py`.
LONE, SHARED = RingCut(), RingCut(2, slots=4)
_FEW_ROWS = 2048  # of an expert: adding takes as long as products of codes


def _cut_for(num_rows: int, num_experts: int, has_codes: bool) -> RingCut:
    """Cut for the mean group, which is what the host knows."""
    return LONE if has_codes and num_rows < _FEW_ROWS * num_experts else SHARED


@dataclass(frozen=True)
class Operand:
    """grad [R, out] or rows [R, in] in bf16 or fp16; or codes [out, R], [in, R] with fp32 scales [n, out], [n, in]."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


def can_run_ring(main_grad: torch.Tensor) -> bool:
    """True if the kernel may run for main_grad [n, out, in] of aligned rows: fp32, on Hopper, with Gluon."""
    if not main_grad.is_cuda or main_grad.dtype != torch.float32 or is_interpreted():
        return False
    aligned = (main_grad.data_ptr(), 4 * main_grad.stride(0), 4 * main_grad.stride(1))
    if any(number % _ALIGNMENT_BYTES for number in aligned) or not main_grad.numel():
        return False
    return torch.cuda.get_device_capability(main_grad.device)[0] == 9 and is_available("gluon")


def ring_wgrad(
    main_grad: torch.Tensor,
    grad: Operand,
    rows: Operand,
    ends: torch.Tensor,
    num_sms: int,
    cut: RingCut | None = None,
) -> None:
    """Add to main_grad fp32 [n, out, in]; group ends int32 [n] on the device.

    Experts' codes begin at multiples of 16 columns. Host: no synchronisation. Graph: capturable.
    """
    num_experts, out_features, in_features = main_grad.shape
    has_codes = grad.scale is not None
    num_rows = grad.values.shape[1 if has_codes else 0]
    cut = _cut_for(num_rows, num_experts, has_codes) if cut is None else cut
    block = _BLOCK_BYTES // grad.values.element_size()
    describe = _code_windows if has_codes else _row_windows
    product_ns = _CODE_NS if has_codes else _PRODUCT_NS
    tile_ns = 2 * _SIDE * _SIDE * (num_rows // num_experts * product_ns + _SUM_NS)  # two tiles at a time on an SM
    num_programs = num_sms * (2 // cut.consumers)
    main_desc = _described(main_grad, main_grad.shape, main_grad.stride(), [1, _HALF, _SIDE])
    left_scale, right_scale = (main_grad if part.scale is None else part.scale for part in (grad, rows))
    operands = (grad.values, rows.values, left_scale, right_scale, ends, main_grad)
    streams.declare("ring grouped wgrad", operands, (main_grad,))
    _ring_kernel[(num_programs,)](
        describe(grad.values, block),
        describe(rows.values, block),
        main_desc,
        main_grad,
        left_scale,
        right_scale,
        ends,
        num_experts,
        out_features,
        in_features,
        main_grad.stride(0),
        int(tile_ns) // (_NUM_TURNS * 16) * 16,
        SIDE=_SIDE,
        BLOCK=block,
        CONSUMERS=cut.consumers,
        SLOTS=cut.slots,
        BAND=cut.band,
        NUM_TURNS=_NUM_TURNS,
        NUM_PROGRAMS=num_programs,
        HAS_CODES=has_codes,
        num_warps=4,
        maxnreg=REGISTERS[cut.consumers],
    )


def _described(tensor: torch.Tensor, shape: Any, strides: Any, block: list[int]) -> Any:
    """Describe a tensor to TMA, with the swizzle of 128 bytes that the tensor cores read."""
    layout = gl.NVMMASharedLayout(128, 8 * tensor.element_size(), rank=3)
    return require("gluon").TensorDescriptor(tensor, list(shape), list(strides), block, layout)


def _row_windows(tensor: torch.Tensor, block: int) -> Any:
    """Rows [R, features] as R windows, of which window r holds the rows from r on."""
    num_rows, features = tensor.shape
    strides = [tensor.stride(0), tensor.stride(0), 1]
    return _described(tensor, [num_rows, block, features], strides, [1, block, _SIDE])


def _code_windows(tensor: torch.Tensor, block: int) -> Any:
    """Codes [features, R] as windows, of which window w holds the columns from 16 w on."""
    features, num_rows = tensor.shape
    shape = [features, -(-num_rows // _WINDOW_STEP), block]
    return _described(tensor, shape, [tensor.stride(0), _WINDOW_STEP, 1], [_SIDE, 1, block])


@gluon_jit
def _tile(tile, ends_ptr, tiles_out, tiles_in, BAND: gl.constexpr):
    """Number of a tile -> expert, first row, end row, place along out and in: bands of tiles share operands."""
    tiles = tiles_out * tiles_in
    expert, place = tile // tiles, tile % tiles
    begin = gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = gl.load(ends_ptr + expert)
    top = place // (BAND * tiles_in) * BAND
    height = gl.minimum(tiles_out - top, BAND)
    inside = place % (BAND * tiles_in)
    return expert, begin, end, top + inside % height, inside // height


@gluon_jit
def _now():
    """Nanoseconds of the device's clock, int64."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon_jit
def _wait_for_turn(turn_ns, NUM_TURNS: gl.constexpr):
    """Wait for none to NUM_TURNS - 1 times a time."""
    begin = _now()
    now = begin
    while now - begin < gl.program_id(0) % NUM_TURNS * turn_ns:
        now = _now()


@gluon_jit
def _await_empty(count, full, empty, BYTES: gl.constexpr, SLOTS: gl.constexpr):
    """Wait until fill `count` may begin and announce its bytes; returns its slot."""
    slot = count % SLOTS
    hopper.mbarrier.wait(empty.index(slot), count // SLOTS % 2 ^ 1)
    hopper.mbarrier.expect(full.index(slot), BYTES)
    return slot


@gluon_jit
def _unit(ring, slot, number):
    """16 KiB of a slot [2, 128, 32] of the ring."""
    pair = ring.index(slot)
    return pair._reinterpret(gl.float32, pair.type.shape, gl.NVMMASharedLayout(128, 32, rank=2)).index(number)


@gluon_jit
def _left_unit(ring, lefts, slot, CONSUMERS: gl.constexpr):
    """Where the block of grad of a slot lies: with one consumer behind its block of rows, else by itself."""
    if CONSUMERS == 1:
        return _unit(ring, slot, 1)
    else:  # noqa: RET505
        return lefts.index(slot)


@gluon_jit
def _produce(
    grad_desc,
    rows_desc,
    main_desc,
    ends_ptr,
    ring,
    lefts,
    full,
    empty,
    num_experts,
    tiles_out,
    tiles_in,
    turn_ns,
    SIDE: gl.constexpr,
    BLOCK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SLOTS: gl.constexpr,
    BAND: gl.constexpr,
    NUM_TURNS: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    HAS_CODES: gl.constexpr,
):
    """Fill the slots of all tiles of this program: blocks of grad and rows [R, *], then pieces of main [n, out, in]."""
    LEFT: gl.constexpr = grad_desc.block_type.shape
    RIGHT: gl.constexpr = rows_desc.block_type.shape
    UNIT_BYTES: gl.constexpr = SIDE * SIDE
    count = 0
    if turn_ns > 0:
        _wait_for_turn(turn_ns, NUM_TURNS)
    for tile in range(gl.program_id(0), num_experts * tiles_out * tiles_in, NUM_PROGRAMS):
        expert, begin, end, down, across = _tile(tile, ends_ptr, tiles_out, tiles_in, BAND)
        first_out, first_in = down * SIDE, across * (SIDE * CONSUMERS)
        for row in range(begin, end, BLOCK):
            absent = BLOCK - gl.minimum(end - row, BLOCK)
            slot = _await_empty(count, full, empty, (1 + CONSUMERS) * UNIT_BYTES, SLOTS)
            bar = full.index(slot)
            left = _left_unit(ring, lefts, slot, CONSUMERS)
            left = left._reinterpret(grad_desc.dtype, LEFT, grad_desc.layout)
            if HAS_CODES:
                hopper.tma.async_copy_global_to_shared(grad_desc, [first_out, row // 16, -absent], bar, left)
            else:
                hopper.tma.async_copy_global_to_shared(grad_desc, [row, -absent, first_out], bar, left)
            for part in gl.static_range(CONSUMERS):
                right = _unit(ring, slot, part)._reinterpret(rows_desc.dtype, RIGHT, rows_desc.layout)
                column = first_in + part * SIDE
                if HAS_CODES:
                    hopper.tma.async_copy_global_to_shared(rows_desc, [column, row // 16, -absent], bar, right)
                else:
                    hopper.tma.async_copy_global_to_shared(rows_desc, [row, -absent, column], bar, right)
            count += 1
        if begin < end:
            for piece in gl.static_range(2 * CONSUMERS):
                slot = _await_empty(count, full, empty, 2 * UNIT_BYTES, SLOTS)
                main = ring.index(slot)._reinterpret(gl.float32, [1, SIDE // 2, SIDE], main_desc.layout)
                place = [expert, first_out + piece % 2 * (SIDE // 2), first_in + piece // 2 * SIDE]
                hopper.tma.async_copy_global_to_shared(main_desc, place, full.index(slot), main)
                count += 1


@gluon_jit
def _multiply_codes(total, left, right):
    """Total [64, 128] + left [64, 128] right [128, 128] in fp32, once all 128 products of an element are summed."""
    part = hopper.warpgroup_mma(left, right, total, use_acc=False, is_async=True)
    return total + hopper.warpgroup_mma_wait(0, deps=[part])


@gluon_jit
def _add_piece(
    part,
    main_ptr,
    first_out,
    first_in,
    out_features,
    in_features,
    slot,
    empty_bar,
    main_desc,
    LAYOUT: gl.constexpr,
):
    """Store part [64, 128] + old values of a slot in a matrix [out, in], and give the slot back."""
    HEIGHT: gl.constexpr = part.shape[0]
    WIDTH: gl.constexpr = part.shape[1]
    old = slot._reinterpret(gl.float32, [1, HEIGHT, WIDTH], main_desc.layout).reshape([HEIGHT, WIDTH]).load(LAYOUT)
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(empty_bar)
    outs = first_out + gl.arange(0, HEIGHT, gl.SliceLayout(1, LAYOUT))
    ins = first_in + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    mask = (outs < out_features)[:, None] & (ins < in_features)[None, :]
    spot = main_ptr + outs.to(gl.int64)[:, None] * in_features + ins[None, :]
    gl.store(spot, old + part, mask=mask)


@gluon_jit
def _consume(
    ME: gl.constexpr,
    grad_desc,
    rows_desc,
    main_desc,
    main_ptr,
    left_scale,
    right_scale,
    ends_ptr,
    ring,
    lefts,
    full,
    empty,
    num_experts,
    out_features,
    in_features,
    main_stride,
    tiles_out,
    tiles_in,
    SIDE: gl.constexpr,
    BLOCK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SLOTS: gl.constexpr,
    BAND: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    HAS_CODES: gl.constexpr,
):
    """Multiply and add consumer ME's columns of all tiles of this program: main [n, out, in]."""
    HALF: gl.constexpr = SIDE // 2
    BITS: gl.constexpr = grad_desc.dtype.primitive_bitwidth
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=2)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 256 // BITS])
    count = 0
    for tile in range(gl.program_id(0), num_experts * tiles_out * tiles_in, NUM_PROGRAMS):
        expert, begin, end, down, across = _tile(tile, ends_ptr, tiles_out, tiles_in, BAND)
        first_out, first_in = down * SIDE, (across * CONSUMERS + ME) * SIDE
        top = gl.zeros((HALF, SIDE), gl.float32, LAYOUT)
        bottom = gl.zeros((HALF, SIDE), gl.float32, LAYOUT)
        for row in range(begin, end, BLOCK):
            slot = count % SLOTS
            hopper.mbarrier.wait(full.index(slot), count // SLOTS % 2)
            left, right = _left_unit(ring, lefts, slot, CONSUMERS), _unit(ring, slot, ME)
            if HAS_CODES:
                halves = left._reinterpret(grad_desc.dtype, [2, HALF, BLOCK], OPERAND)
                codes = right._reinterpret(rows_desc.dtype, [SIDE, BLOCK], OPERAND).permute((1, 0))
                top = _multiply_codes(top, halves.index(0), codes)
                bottom = _multiply_codes(bottom, halves.index(1), codes)
                hopper.mbarrier.arrive(empty.index(slot))
            else:
                halves = left._reinterpret(grad_desc.dtype, [2, BLOCK, HALF], OPERAND)
                block = right._reinterpret(rows_desc.dtype, [BLOCK, SIDE], OPERAND)
                top = hopper.warpgroup_mma(halves.index(0).permute((1, 0)), block, top, is_async=True)
                bottom = hopper.warpgroup_mma(halves.index(1).permute((1, 0)), block, bottom, is_async=True)
                top, bottom = hopper.warpgroup_mma_wait(2, deps=[top, bottom])  # those of the block before ended
                hopper.mbarrier.arrive(empty.index((count + SLOTS - 1) % SLOTS), pred=row > begin)
            count += 1
        if begin < end:
            if not HAS_CODES:
                top, bottom = hopper.warpgroup_mma_wait(0, deps=[top, bottom])
                hopper.mbarrier.arrive(empty.index((count + SLOTS - 1) % SLOTS))
            matrix = main_ptr + gl.cast(expert, gl.int64) * main_stride
            for piece in gl.static_range(2 * CONSUMERS):
                slot = count % SLOTS
                hopper.mbarrier.wait(full.index(slot), count // SLOTS % 2)
                if piece // 2 == ME:
                    part = top if piece % 2 == 0 else bottom
                    out = first_out + piece % 2 * HALF
                    if HAS_CODES:
                        outs = out + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
                        ins = first_in + gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))
                        left = gl.load(left_scale + expert * out_features + outs, mask=outs < out_features, other=0.0)
                        part *= left[:, None]
                        right_line = right_scale + expert * in_features + ins
                        part *= gl.load(right_line, mask=ins < in_features, other=0.0)[None, :]
                    _add_piece(
                        part,
                        matrix,
                        out,
                        first_in,
                        out_features,
                        in_features,
                        ring.index(slot),
                        empty.index(slot),
                        main_desc,
                        LAYOUT,
                    )
                else:
                    hopper.mbarrier.arrive(empty.index(slot))
                count += 1


@gluon_jit
def _ring_kernel(
    grad_desc,
    rows_desc,
    main_desc,
    main_ptr,
    left_scale,
    right_scale,
    ends_ptr,
    num_experts,
    out_features,
    in_features,
    main_stride,
    turn_ns,
    SIDE: gl.constexpr,
    BLOCK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SLOTS: gl.constexpr,
    BAND: gl.constexpr,
    NUM_TURNS: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    HAS_CODES: gl.constexpr,
):
    """Add the tiles of this program: grad and rows [R, *] or codes [*, R] -> main [n, out, in]."""
    tiles_out = gl.cdiv(out_features, SIDE)
    tiles_in = gl.cdiv(in_features, SIDE * CONSUMERS)
    # for each consumer 16 KiB of rows and for all of them 16 KiB of grad, or 32 KiB of what a tile is added to
    UNITS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=3)
    ring = gl.allocate_shared_memory(gl.float32, [SLOTS, 2, SIDE, SIDE // 4], UNITS)
    if CONSUMERS == 1:
        lefts = ring
    else:
        lefts = gl.allocate_shared_memory(gl.float32, [SLOTS, SIDE, SIDE // 4], gl.NVMMASharedLayout(128, 32, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(slot), count=1)
        hopper.mbarrier.init(empty.index(slot), count=CONSUMERS)
    # fmt: off
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (
                0,
                grad_desc, rows_desc, main_desc, main_ptr, left_scale, right_scale, ends_ptr, ring, lefts, full,
                empty, num_experts, out_features, in_features, main_stride, tiles_out, tiles_in, SIDE, BLOCK,
                CONSUMERS, SLOTS, BAND, NUM_PROGRAMS, HAS_CODES,
            )),
            (_produce, (
                grad_desc, rows_desc, main_desc, ends_ptr, ring, lefts, full, empty, num_experts, tiles_out,
                tiles_in, turn_ns, SIDE, BLOCK, CONSUMERS, SLOTS, BAND, NUM_TURNS, NUM_PROGRAMS, HAS_CODES,
            )),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (_consume, (
                0,
                grad_desc, rows_desc, main_desc, main_ptr, left_scale, right_scale, ends_ptr, ring, lefts, full,
                empty, num_experts, out_features, in_features, main_stride, tiles_out, tiles_in, SIDE, BLOCK,
                CONSUMERS, SLOTS, BAND, NUM_PROGRAMS, HAS_CODES,
            )),
            (_consume, (
                1,
                grad_desc, rows_desc, main_desc, main_ptr, left_scale, right_scale, ends_ptr, ring, lefts, full,
                empty, num_experts, out_features, in_features, main_stride, tiles_out, tiles_in, SIDE, BLOCK,
                CONSUMERS, SLOTS, BAND, NUM_PROGRAMS, HAS_CODES,
            )),
            (_produce, (
                grad_desc, rows_desc, main_desc, ends_ptr, ring, lefts, full, empty, num_experts, tiles_out,
                tiles_in, turn_ns, SIDE, BLOCK, CONSUMERS, SLOTS, BAND, NUM_TURNS, NUM_PROGRAMS, HAS_CODES,
            )),
        ], [4, 1], [232, 24])
    # fmt: on
