"""The grouped weight gradient on a GPU: one persistent kernel that adds to the main gradients as it ends each tile.

    main_grad[e][tile] += sum over the rows r of expert e of grad[r][outs]^T rows[r][ins]

Programs walk over the tiles of all experts, expert by expert, so that the rows of one expert are read from the cache,
and over the blocks of rows of their tiles in one loop: blocks of the next tile arrive while this one is added.

    1. A block of rows comes by TMA and goes straight from shared memory into the tensor cores. TMA sees windows of
       rows: a block that begins in front of its window has zeros there, so that the last rows of a group, fewer than a
       block, are read as a block as well, and rows of the next group, or undefined ones behind the last, are not.
    2. After the last block the sum is added in fp32, each element by exactly one program, in pieces, which keeps
       registers and shared memory free.

All programs would add at once and multiply at once, so that memory and tensor cores took turns: `skews` lets them begin
at different times. Group ends are read on the device. An expert without rows costs a block of zeros, and its tiles are
not touched. Rows are summed in order: of the configuration, the result depends on the size of a block alone.

This form defines the sums. `ring_wgrad` has its bits, and takes its place where it can run and is faster: unless both
sides of an expert are wide.

Legend: R rows, n experts, out and in features.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.ring_wgrad import Operand, can_run_ring, ring_wgrad
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import is_available, require, tl, triton_jit

_ALIGNMENT_BYTES = 16  # of addresses and strides that TMA takes
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_NS_PER_PRODUCT, _NS_PER_SUM = 0.4e-3, 0.12
"""What an SM takes for an element of a tile: a row's product, and the addition to memory."""
_TURNS = 8
_WIDE = 4096
"""From this width of the narrower side on, this form is as fast as the ring or faster."""


@dataclass(frozen=True)
class WgradConfig:
    """How the kernel is cut; changes speed, and with `block_rows` the last bits."""

    block_out: int = 128
    block_in: int = 256
    block_rows: int = 64
    band: int = 16
    """tiles along out that are walked before the next tile along in"""
    programs_per_sm: int = 1
    num_warps: int = 8
    num_stages: int = 4
    pieces: int = 4
    """a tile is added in so many pieces: 2 or 4"""
    skews: bool = True
    """let programs begin at eight times within the first tile"""


LARGE = WgradConfig()
SMALL = WgradConfig(128, 128, band=8, programs_per_sm=2, num_warps=4, num_stages=3, pieces=2, skews=False)
# Filled by `tools/benchmark/grouped_gemm.py --sweep`: narrow side below 2048?
CONFIGS: dict[bool, WgradConfig] = {False: LARGE, True: SMALL}


def config_for(out_features: int, in_features: int) -> WgradConfig:
    """Row of the table for a shape."""
    return CONFIGS[min(out_features, in_features) < 2048]


def uses_wgrad_kernel(main_grad: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> bool:
    """True if the kernel takes main_grad [n, out, in], grad [R, out], rows [R, in]."""
    is_dtype_known = grad.dtype == rows.dtype and grad.dtype in _KERNEL_DTYPES
    if not (grad.is_cuda and is_dtype_known and is_available("triton_descriptor")):
        return False
    return all(_is_tma_operand(tensor) for tensor in (main_grad, grad, rows))


def _is_tma_operand(tensor: torch.Tensor) -> bool:
    """True if the tensor [..., width] can be described to TMA."""
    size = tensor.element_size()
    strides = [stride * size % _ALIGNMENT_BYTES for stride in tensor.stride()[:-1]]
    is_aligned = tensor.data_ptr() % _ALIGNMENT_BYTES == 0 and not any(strides)
    return is_aligned and tensor.stride(-1) == 1 and tensor.numel() > 0


def grouped_wgrad(
    main_grad: torch.Tensor,
    grad: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    config: WgradConfig | None = None,
) -> None:
    """Add to main_grad [n, out, in]: grad [R, out], rows [R, in], group ends int32 [n] on the device.

    Host:  no synchronisation.
    Graph: capturable.
    Dtype: operands bf16 or fp16, main_grad any float; sums in fp32, one rounding at the end.
    """
    num_experts, out_features, in_features = main_grad.shape
    if config is None and min(out_features, in_features) < _WIDE and can_run_ring(main_grad):
        ring_wgrad(main_grad, Operand(grad), Operand(rows), ends, num_free_sms(grad.device))
        return
    cut = config_for(out_features, in_features) if config is None else config
    assert main_grad.stride(1) == in_features, f"rows of {in_features} lie {main_grad.stride(1)} apart"
    interpreted = is_interpreted()
    num_programs = cut.programs_per_sm * num_free_sms(grad.device)
    ns_per_element = len(grad) // num_experts * _NS_PER_PRODUCT + _NS_PER_SUM
    turn_ns = int(cut.block_out * cut.block_in * cut.programs_per_sm * ns_per_element) // _TURNS
    streams.declare("grouped wgrad", (grad, rows, ends, main_grad), (main_grad,))
    _grouped_wgrad_kernel[(num_programs,)](
        _windows(grad, cut.block_rows, cut.block_out),
        _windows(rows, cut.block_rows, cut.block_in),
        main_grad,
        ends,
        num_experts,
        out_features,
        in_features,
        main_grad.stride(0),
        turn_ns // 16 * 16,  # a multiple of 16, so that all shapes share a build
        EXPERTS=max(64, 1 << (num_experts - 1).bit_length()),
        BLOCK_OUT=cut.block_out,
        BLOCK_IN=cut.block_in,
        BLOCK_ROWS=cut.block_rows,
        BAND=cut.band,
        PIECES=cut.pieces,
        TURNS=_TURNS if cut.skews and not interpreted else 1,
        NUM_PROGRAMS=num_programs,
        INTERPRETED=interpreted,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )


def _windows(tensor: torch.Tensor, block_rows: int, width: int) -> Any:
    """Describe a matrix [R, features] to TMA as R windows, of which window r holds the rows from r on.

    A block that begins in front of its window gets zeros for the rows that are missing there: so groups of any size
    are read in whole blocks, and never a row of another group.
    """
    num_rows, features = tensor.shape
    shape, strides = [num_rows, block_rows, features], [tensor.stride(0), tensor.stride(0), 1]
    return require("triton_descriptor").TensorDescriptor(tensor, shape, strides, [1, block_rows, width])


def described(tensor: torch.Tensor, block: list[int]) -> Any:
    """Describe a tensor [..., width] to TMA."""
    return require("triton_descriptor").TensorDescriptor.from_tensor(tensor, block)


def num_free_sms(device: torch.device) -> int:
    """SMs that a product may use: all but those reserved for communication. Interpreted: a few programs."""
    if device.type != "cuda":
        return 4
    reserved = torch._C._get_sm_carveout_experimental() or 0
    return torch.cuda.get_device_properties(device).multi_processor_count - reserved


def describe(config: WgradConfig) -> str:
    """One line for tables and logs."""
    return " ".join(f"{name}={value}" for name, value in asdict(config).items())


@triton_jit
def _place(place, tiles_out, tiles_in, BAND: tl.constexpr):
    """Number of a tile in its expert -> (along out, along in): bands, so that programs side by side share operands."""
    top = place // (BAND * tiles_in) * BAND
    height = tl.minimum(tiles_out - top, BAND)
    inside = place % (BAND * tiles_in)
    return top + inside % height, inside // height


@triton_jit
def _steps_of_program(
    ends_ptr,
    num_experts,
    tiles,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Blocks of rows that this program multiplies, all tiles together; a tile without rows counts as one."""
    ids = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + ids, mask=ids < num_experts, other=0)
    begins = tl.load(ends_ptr + ids - 1, mask=(ids > 0) & (ids < num_experts), other=0)
    start = tl.program_id(0)
    before = tl.cdiv(tl.maximum(ids * tiles - start, 0), NUM_PROGRAMS)  # tiles of this program in earlier experts
    behind = tl.cdiv(tl.maximum((ids + 1) * tiles - start, 0), NUM_PROGRAMS)
    steps = (behind - before) * tl.maximum(tl.cdiv(ends - begins, BLOCK_ROWS), 1)
    return tl.sum(tl.where(ids < num_experts, steps, 0))


@triton_jit
def _load_rows(desc, row, end, column, BLOCK_ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [row, end) of a window [R, BLOCK_ROWS, width], at most a block -> [BLOCK_ROWS, WIDTH], zeros in front."""
    absent = BLOCK_ROWS - tl.minimum(end - row, BLOCK_ROWS)
    return tl.reshape(desc.load([row, -absent, column]), (BLOCK_ROWS, WIDTH))


@triton_jit
def _halves(tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Tile [HEIGHT, WIDTH] -> its columns in the first and in the second half, [HEIGHT, WIDTH / 2] each."""
    return tl.split(tl.permute(tl.reshape(tile, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@triton_jit
def _add_piece(
    part,
    lines,
    is_line,
    column,
    in_features,
    WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add part [out, WIDTH] to columns of the lines [out, 1] of a matrix."""
    columns = (column + tl.arange(0, WIDTH))[None, :]
    mask = is_line & (columns < in_features)
    before = tl.load(lines + columns, mask=mask, other=0.0).to(tl.float32)
    value = narrow(before + part, lines.dtype.element_ty, INTERPRETED)
    tl.store(lines + columns, value, mask=mask)


@triton_jit
def _add_tile(
    total,
    lines,
    is_line,
    column,
    in_features,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PIECES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add total [out, in] to the lines [out, 1] of a matrix in pieces, which keeps registers and shared memory free."""
    west, east = _halves(total, BLOCK_OUT, BLOCK_IN)
    if PIECES == 2:
        _add_piece(west, lines, is_line, column, in_features, BLOCK_IN // 2, INTERPRETED)
        _add_piece(east, lines, is_line, column + BLOCK_IN // 2, in_features, BLOCK_IN // 2, INTERPRETED)
    else:
        WIDTH: tl.constexpr = BLOCK_IN // 4
        first, second = _halves(west, BLOCK_OUT, BLOCK_IN // 2)
        third, fourth = _halves(east, BLOCK_OUT, BLOCK_IN // 2)
        _add_piece(first, lines, is_line, column, in_features, WIDTH, INTERPRETED)
        _add_piece(second, lines, is_line, column + WIDTH, in_features, WIDTH, INTERPRETED)
        _add_piece(third, lines, is_line, column + 2 * WIDTH, in_features, WIDTH, INTERPRETED)
        _add_piece(fourth, lines, is_line, column + 3 * WIDTH, in_features, WIDTH, INTERPRETED)


@triton_jit
def _wait_for_turn(turn_ns, TURNS: tl.constexpr):
    """Wait for none to TURNS - 1 times a time."""
    begin = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - begin < tl.program_id(0) % TURNS * turn_ns:
        pass


@triton_jit
def _grouped_wgrad_kernel(
    grad_desc,
    rows_desc,
    main_ptr,
    ends_ptr,
    num_experts,
    out_features,
    in_features,
    main_stride,
    turn_ns,
    EXPERTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BAND: tl.constexpr,
    PIECES: tl.constexpr,
    TURNS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the tiles of this program: grad [R, out], rows [R, in] -> main [n, out, in]; one loop over blocks of rows."""
    tiles_in = tl.cdiv(in_features, BLOCK_IN)
    tiles_out = tl.cdiv(out_features, BLOCK_OUT)
    tiles = tiles_out * tiles_in
    steps = _steps_of_program(ends_ptr, num_experts, tiles, EXPERTS, BLOCK_ROWS, NUM_PROGRAMS)
    tile = tl.program_id(0) - NUM_PROGRAMS
    expert = tile
    row, end, first_out, first_in = 0, 0, 0, 0
    if TURNS > 1:
        _wait_for_turn(turn_ns, TURNS)
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    for _ in tl.range(0, steps):
        row += BLOCK_ROWS
        if row >= end:
            tile += NUM_PROGRAMS
            expert = tile // tiles
            row = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
            end = tl.load(ends_ptr + expert)
            down, across = _place(tile % tiles, tiles_out, tiles_in, BAND)
            first_out, first_in = down * BLOCK_OUT, across * BLOCK_IN
        left = _load_rows(grad_desc, row, end, first_out, BLOCK_ROWS, BLOCK_OUT)
        right = _load_rows(rows_desc, row, end, first_in, BLOCK_ROWS, BLOCK_IN)
        if INTERPRETED:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(tl.trans(left), right, total)
        if row + BLOCK_ROWS >= end:
            outs = first_out + tl.arange(0, BLOCK_OUT)
            lines = main_ptr + expert.to(tl.int64) * main_stride + outs.to(tl.int64)[:, None] * in_features
            is_line = ((outs < out_features) & (row < end))[:, None]  # an expert without rows is left alone
            _add_tile(total, lines, is_line, first_in, in_features, BLOCK_OUT, BLOCK_IN, PIECES, INTERPRETED)
            # a zero that is not known before: the compiler would move it out of the branch, in front of sums in flight
            zero = tl.load(ends_ptr, volatile=True).to(tl.float32) * 0.0
            total = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32) + zero
