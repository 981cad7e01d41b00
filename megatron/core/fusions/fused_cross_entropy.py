"""Cross entropy over a long vocabulary, as two kernels that each read the logits once.

    scan       peak = max_j x_j,  total = sum_j exp(x_j - peak),  score = x_target        one pass, all three at a time
    gradient   dx_j = (exp(x_j - peak) / total - [j == target]) * dy                      one pass

The scan keeps a running maximum and rescales its sum whenever the maximum grows. Between the two only the logits, as
they are, and two fp32 numbers of a row are kept; the plain form keeps an fp32 softmax. A row belongs to one program,
its columns are added in a fixed order: repeated runs give the same bits. Sums and exponentials are fp32.

The columns are a part of the vocabulary that begins at id `first`; what they say together with other parts is the
caller's business. Filler columns after the real ones take no part and get a zero gradient.

Legend: T rows (tokens), v columns, r real columns, V ids of the whole vocabulary.
"""

# ruff: noqa: ANN001, ANN202 (a compiled kernel takes no annotations but tl.constexpr)
from dataclasses import dataclass

import torch

from megatron.core import streams
from megatron.core.fusions.fused_row_layout import uses_kernels
from megatron.core.fusions.triton_casts import is_interpreted, narrow
from megatron.core.optional_deps import tl, triton_jit

SCAN_TILE, GRADIENT_TILE = 4096, 8192
"""Columns that a program of each kernel handles at a time; the fastest of those tried on an H200, as the warps are."""
SCAN_WARPS, GRADIENT_WARPS = 4, 16


@dataclass(frozen=True)
class VocabularyPart:
    """Which ids the columns of a matrix of logits stand for."""

    first: int
    """Id of column 0."""

    num_real: int
    """r, columns that stand for tokens; the others are filler."""

    vocabulary: int
    """V, ids of all parts."""


def uses_loss_kernels(logits: torch.Tensor, dtype: torch.dtype) -> bool:
    """True where the kernels can replace the plain form: logits [any] on a GPU, not fp64, scored in fp32."""
    return uses_kernels(logits) and logits.dtype != torch.float64 and dtype == torch.float32


def scan_logits(logits: torch.Tensor, targets: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """Logits [T, v], target ids int64 [T] -> fp32 [3, T]: peak, total and score of each row.

    The score is 0 for a target that is another part's, NaN for one that is not in the vocabulary. Without real columns
    the peak is -inf and the total 0.
    Host: no synchronisation. Graph: capturable.
    """
    logits, targets = _readable(logits), targets.contiguous()
    num_rows, width = logits.shape
    found = logits.new_empty(3, num_rows, dtype=torch.float32)
    if num_rows:
        streams.declare("scan logits", (logits, targets), (found,))
        numbers = (num_rows, width, logits.stride(0), part.first, part.num_real, part.vocabulary)
        _scan_kernel[(num_rows,)](logits, targets, found, *numbers, _tile(width, SCAN_TILE), num_warps=SCAN_WARPS)
    return found


def logit_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    peak_and_total: tuple[torch.Tensor, torch.Tensor],
    grad: torch.Tensor,
    part: VocabularyPart,
) -> torch.Tensor:
    """Logits [T, v], target ids int64 [T], peaks and totals fp32 [T] of the whole vocabulary, grad [T] -> [T, v].

    Dtype:  fp32 inside, rounded once to the dtype of the logits.
    Memory: the logits stay as they are, since others may hold them (a retained graph, recompute); no other temporary.
    """
    logits, targets, grad = _readable(logits), targets.contiguous(), grad.contiguous()
    peak, total = peak_and_total
    num_rows, width = logits.shape
    result = logits.new_empty(num_rows, width)
    if num_rows:
        streams.declare("gradient of logits", (logits, targets, peak, total, grad), (result,))
        tensors = (logits, targets, peak, total, grad, result)
        numbers = (width, logits.stride(0), part.first, part.num_real, is_interpreted())
        _gradient_kernel[(num_rows,)](*tensors, *numbers, _tile(width, GRADIENT_TILE), num_warps=GRADIENT_WARPS)
    return result


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """[T, v] with neighbouring columns."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _tile(width: int, largest: int) -> int:
    """Columns of a program: a power of two, no more than the row needs."""
    return min(largest, max(16, 1 << max(width - 1, 0).bit_length()))


@triton_jit
def _scan_kernel(
    logits,
    targets,
    found,
    num_rows,
    width,
    stride,
    first,
    num_real,
    vocabulary,
    columns: tl.constexpr,
):
    """One row of the logits [T, v] and its target [T] -> its column of found [3, T]."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak = tl.full((), -float("inf"), tl.float32)
    sums = tl.zeros([columns], dtype=tl.float32)
    for begin in range(0, width, columns):
        column = begin + tl.arange(0, columns)
        x = tl.load(logits + column, mask=column < width, other=-float("inf")).to(tl.float32)
        x = tl.where(column < num_real, x, -float("inf"))
        higher = tl.maximum(peak, tl.max(x, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far: exp(-inf - 0) = 0
        sums = sums * tl.exp(peak - shift) + tl.exp(x - shift)
        peak = higher
    target = tl.load(targets + row) - first
    is_here = (target >= 0) & (target < num_real)
    is_known = (target + first >= 0) & (target + first < vocabulary)
    score = tl.load(logits + target, mask=is_here, other=0.0).to(tl.float32)
    tl.store(found + row, peak)
    tl.store(found + num_rows + row, tl.sum(sums, 0))
    tl.store(found + 2 * num_rows + row, tl.where(is_known, score, float("nan")))


@triton_jit
def _gradient_kernel(
    logits,
    targets,
    peaks,
    totals,
    grads,
    result,
    width,
    stride,
    first,
    num_real,
    interpreted: tl.constexpr,
    columns: tl.constexpr,
):
    """One row of the gradient [T, v] from logits [T, v], target, peak, total and gradient of the loss [T]."""
    row = tl.program_id(0).to(tl.int64)
    peak, scale = tl.load(peaks + row), 1.0 / tl.load(totals + row)
    grad = tl.load(grads + row).to(tl.float32)
    target = tl.load(targets + row) - first
    for begin in range(0, width, columns):
        column = begin + tl.arange(0, columns)
        x = tl.load(logits + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        share = tl.exp(x - peak) * scale - tl.where(column == target, 1.0, 0.0)
        value = tl.where(column < num_real, share * grad, 0.0)
        tl.store(
            result + row * width + column, narrow(value, result.dtype.element_ty, interpreted), mask=column < width
        )
