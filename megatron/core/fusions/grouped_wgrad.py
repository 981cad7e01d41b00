"""The grouped weight gradient on a GPU: one persistent kernel that adds to the main gradients as it ends each tile.

    main_grad[e][tile] += sum over the rows r of expert e of grad[r][outs]^T rows[r][ins]

Programs walk over the tiles of all experts, expert by expert, so that the rows of one expert are read from the cache.
Inside a tile:

    1. whole blocks of rows come by TMA and go straight from shared memory into the tensor cores, several blocks ahead;
    2. the last rows of the group, fewer than a block, come by masked loads: a block would reach into the next group,
       or behind the last one, where undefined numbers are;
    3. the sum is added in fp32, each element by exactly one program. For fp32 main gradients the addition is left to
       the memory (TMA reduction), so that it runs beside the products of the next tile; otherwise the tile is read,
       added to and written in halves, which keeps registers free.

The flat form (`is_flat`) walks over the blocks of all tiles in one loop, so that blocks of the next tile arrive while
this one is added, and reads the last rows of a group as a block whose missing rows TMA fills with zeros.

Group ends are read on the device. An expert without rows costs one comparison and its tiles are not touched. Rows are
summed in order, whatever the tile: the result of a form does not depend on the configuration (smaller than the normal
numbers of fp32 may be flushed to zero by the reduction).

Legend: R rows, n experts, out and in features.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megatron.core import streams
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import is_available, require, tl, triton_jit

_ALIGNMENT_BYTES = 16  # of addresses and strides that TMA takes
_LINE_BYTES = 128
_NS_PER_PRODUCT, _NS_PER_SUM = 0.4e-3, 0.12
"""What an SM takes for an element of a tile: a row's product, and the addition to memory."""
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WgradConfig:
    """How the kernel is cut; changes speed, not results."""

    block_out: int = 128
    block_in: int = 256
    block_rows: int = 64
    band: int = 8
    """tiles along out that are walked before the next tile along in"""
    programs_per_sm: int = 1
    num_warps: int = 8
    num_stages: int = 3
    reduces_in_memory: bool = True
    """add by TMA reduction; only fp32 main gradients, and not interpreted"""
    is_flat: bool = False
    """one loop over the blocks of all tiles: blocks of the next tile arrive while this one is added"""
    pieces: int = 2
    """a flat tile is added in so many pieces: 2 or 4"""
    prefetches: bool = False
    """ask for lines of a flat tile beside each of its products, so that they are in the cache when they are added to"""
    skews: bool = False
    """let programs begin at eight times within the first tile, so that not all add to memory at once"""


# Filled by `tools/benchmark/grouped_gemm.py --sweep`: (narrow side below 1024?, rows per expert below 1024?).
CONFIGS: dict[tuple[bool, bool], WgradConfig] = {
    (False, False): WgradConfig(num_stages=4, reduces_in_memory=False),
    (False, True): WgradConfig(num_stages=4, reduces_in_memory=False),
    (True, False): WgradConfig(num_stages=4, reduces_in_memory=False),
    (True, True): WgradConfig(num_stages=4, reduces_in_memory=False),
}


def config_for(num_rows: int, num_experts: int, out_features: int, in_features: int) -> WgradConfig:
    """Row of the table for a shape; the host knows the mean group only."""
    return CONFIGS[min(out_features, in_features) < 1024, num_rows < 1024 * num_experts]


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
    cut = config_for(len(rows), num_experts, out_features, in_features) if config is None else config
    interpreted = is_interpreted()
    if interpreted or main_grad.dtype != torch.float32:
        cut = replace(cut, reduces_in_memory=False)
    num_programs = cut.programs_per_sm * num_free_sms(grad.device)
    if cut.is_flat:
        _launch_flat(main_grad, grad, rows, ends, cut, num_programs)
        return
    streams.declare("grouped wgrad", (grad, rows, ends, main_grad), (main_grad,))
    _grouped_wgrad_kernel[(num_programs,)](
        described(grad, [cut.block_rows, cut.block_out]),
        described(rows, [cut.block_rows, cut.block_in]),
        described(main_grad, [1, cut.block_out, cut.block_in // 2]),
        grad,
        rows,
        main_grad,
        ends,
        num_experts,
        out_features,
        in_features,
        main_grad.stride(0),
        grad.stride(0),
        rows.stride(0),
        BLOCK_OUT=cut.block_out,
        BLOCK_IN=cut.block_in,
        BLOCK_ROWS=cut.block_rows,
        BAND=cut.band,
        NUM_PROGRAMS=num_programs,
        REDUCES=cut.reduces_in_memory,
        INTERPRETED=interpreted,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )


def _launch_flat(
    main_grad: torch.Tensor,
    grad: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    cut: WgradConfig,
    num_programs: int,
) -> None:
    """Run the kernel with one loop: main_grad [n, out, in], grad [R, out], rows [R, in], ends [n]."""
    num_experts, out_features, in_features = main_grad.shape
    interpreted = is_interpreted()
    mean_rows = len(grad) // num_experts
    lines = cut.block_in * main_grad.element_size() // _LINE_BYTES
    share = 1 << max(0, (cut.block_out * cut.block_rows - 1) // max(mean_rows, 1)).bit_length()
    tile_ns = cut.block_out * cut.block_in * cut.programs_per_sm * (mean_rows * _NS_PER_PRODUCT + _NS_PER_SUM)
    streams.declare("flat grouped wgrad", (grad, rows, ends, main_grad), (main_grad,))
    _flat_kernel[(num_programs,)](
        _windows(grad, cut.block_rows, cut.block_out),
        _windows(rows, cut.block_rows, cut.block_in),
        main_grad,
        ends,
        num_experts,
        out_features,
        in_features,
        main_grad.stride(0),
        int(tile_ns) // 128 * 16,
        EXPERTS=max(64, 1 << (num_experts - 1).bit_length()),
        BLOCK_OUT=cut.block_out,
        BLOCK_IN=cut.block_in,
        BLOCK_ROWS=cut.block_rows,
        BAND=cut.band,
        PIECES=cut.pieces,
        LINES=lines,
        SHARE=share if cut.prefetches and not interpreted else 0,
        SKEWS=cut.skews and not interpreted,
        THREADS=32 * cut.num_warps,
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
def _prefetch_lines(
    main_ptr,
    first_out,
    end_out,
    first_in,
    in_features,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    SHARE: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Ask for SHARE rows of a tile of a matrix [out, in], not for those from end_out on.

    A line of 128 bytes has LINE elements, a row of the tile LINES lines; a thread asks for one.
    """
    ids = tl.arange(0, THREADS)
    for part in tl.static_range((SHARE * LINES + THREADS - 1) // THREADS):
        places = ids + part * THREADS
        rows, columns = first_out + places // LINES, first_in + places % LINES * LINE
        is_asked = (places < SHARE * LINES) & (rows < end_out) & (columns < in_features)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [main_ptr + rows.to(tl.int64) * in_features + columns, is_asked.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton_jit
def _wait_for_turn(skew_ns):
    """Wait for none to seven times a time."""
    begin = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - begin < tl.program_id(0) % 8 * skew_ns:
        pass


@triton_jit
def _flat_kernel(
    grad_desc,
    rows_desc,
    main_ptr,
    ends_ptr,
    num_experts,
    out_features,
    in_features,
    main_stride,
    skew_ns,
    EXPERTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BAND: tl.constexpr,
    PIECES: tl.constexpr,
    LINES: tl.constexpr,
    SHARE: tl.constexpr,
    SKEWS: tl.constexpr,
    THREADS: tl.constexpr,
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
    begin, row, end, first_out, first_in = 0, 0, 0, 0, 0
    if SKEWS:
        _wait_for_turn(skew_ns)
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    for _ in tl.range(0, steps):
        row += BLOCK_ROWS
        if row >= end:
            tile += NUM_PROGRAMS
            expert = tile // tiles
            begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
            row = begin
            end = tl.load(ends_ptr + expert)
            down, across = _place(tile % tiles, tiles_out, tiles_in, BAND)
            first_out, first_in = down * BLOCK_OUT, across * BLOCK_IN
        left = _load_rows(grad_desc, row, end, first_out, BLOCK_ROWS, BLOCK_OUT)
        right = _load_rows(rows_desc, row, end, first_in, BLOCK_ROWS, BLOCK_IN)
        if INTERPRETED:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(tl.trans(left), right, total)
        if SHARE > 0:
            main = main_ptr + expert.to(tl.int64) * main_stride
            behind = tl.minimum(first_out + BLOCK_OUT, out_features)
            asked = first_out + (row - begin) // BLOCK_ROWS * SHARE
            _prefetch_lines(main, asked, behind, first_in, in_features, LINES, BLOCK_IN // LINES, SHARE, THREADS)
        if row + BLOCK_ROWS >= end:
            outs = first_out + tl.arange(0, BLOCK_OUT)
            lines = main_ptr + expert.to(tl.int64) * main_stride + outs.to(tl.int64)[:, None] * in_features
            is_line = ((outs < out_features) & (row < end))[:, None]  # an expert without rows is left alone
            _add_tile(total, lines, is_line, first_in, in_features, BLOCK_OUT, BLOCK_IN, PIECES, INTERPRETED)
            # a zero that is not known before: the compiler would move it out of the branch, in front of sums in flight
            zero = tl.load(ends_ptr, volatile=True).to(tl.float32) * 0.0
            total = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32) + zero


@triton_jit
def _grouped_wgrad_kernel(
    grad_desc,
    rows_desc,
    main_desc,
    grad_ptr,
    rows_ptr,
    main_ptr,
    ends_ptr,
    num_experts,
    out_features,
    in_features,
    main_stride,
    grad_stride,
    rows_stride,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BAND: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    REDUCES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the tiles of this program: grad [R, out], rows [R, in] -> main [n, out, in]."""
    HALF: tl.constexpr = BLOCK_IN // 2
    tiles_out = tl.cdiv(out_features, BLOCK_OUT)
    tiles_in = tl.cdiv(in_features, BLOCK_IN)
    tiles = tiles_out * tiles_in
    for tile in tl.range(tl.program_id(0), num_experts * tiles, NUM_PROGRAMS):
        expert = tile // tiles
        begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert)
        if begin < end:
            # bands of tiles along out, so that programs side by side share operands
            place = tile % tiles
            top = place // (BAND * tiles_in) * BAND
            height = tl.minimum(tiles_out - top, BAND)
            first_out = (top + place % (BAND * tiles_in) % height) * BLOCK_OUT
            first_in = place % (BAND * tiles_in) // height * BLOCK_IN
            # Step 1
            num_whole = (end - begin) // BLOCK_ROWS
            total = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
            for block in tl.range(0, num_whole):
                row = begin + block * BLOCK_ROWS
                left = grad_desc.load([row, first_out])
                right = rows_desc.load([row, first_in])
                if INTERPRETED:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                total = tl.dot(tl.trans(left), right, total)
            # Step 2
            outs = first_out + tl.arange(0, BLOCK_OUT)
            first = begin + num_whole * BLOCK_ROWS
            if first < end:
                ids = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
                ins = first_in + tl.arange(0, BLOCK_IN)
                left_mask = (ids < end) & (outs < out_features)[None, :]
                right_mask = (ids < end) & (ins < in_features)[None, :]
                left = tl.load(grad_ptr + ids * grad_stride + outs[None, :], mask=left_mask, other=0.0)
                right = tl.load(rows_ptr + ids * rows_stride + ins[None, :], mask=right_mask, other=0.0)
                if INTERPRETED:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                total = tl.dot(tl.trans(left), right, total)
            # Step 3
            halves = tl.permute(tl.reshape(total, (BLOCK_OUT, 2, HALF)), (0, 2, 1))
            near, far = tl.split(halves)
            for half in tl.static_range(2):
                part = near if half == 0 else far
                column = first_in + half * HALF
                if REDUCES:
                    main_desc.atomic_add([expert, first_out, column], tl.reshape(part, (1, BLOCK_OUT, HALF)))
                else:
                    columns = column + tl.arange(0, HALF)
                    spot = main_ptr + expert.to(tl.int64) * main_stride
                    spot += outs.to(tl.int64)[:, None] * in_features + columns[None, :]
                    mask = (outs < out_features)[:, None] & (columns < in_features)[None, :]
                    before = tl.load(spot, mask=mask, other=0.0).to(tl.float32)
                    tl.store(spot, narrow(before + part, main_ptr.dtype.element_ty, INTERPRETED), mask=mask)
