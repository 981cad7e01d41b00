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

Group ends are read on the device. An expert without rows costs one comparison and its tiles are not touched. Rows are
summed in order, whatever the tile: the result does not depend on the configuration (smaller than the normal numbers of
fp32 may be flushed to zero by the reduction).

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
