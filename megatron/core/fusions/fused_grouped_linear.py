"""Many matrices, one call: rows sorted by expert, each group of rows times the matrix of its expert.

    out[r] = rows[r] @ weight[e(r)]^T          e(r): the expert whose group row r lies in

Two forms with the same meaning. On a GPU in bf16, `torch._grouped_mm` takes the group ends as a device tensor, so the
host need not know the counts. Otherwise a loop of plain products runs over counts on the host; it serves every dtype,
fp64 included, and on a CPU it is as fast as the grouped kernel in bf16 and several times faster in fp32.

The weights are n separate parameters, because each expert has its own name, gradient and checkpoint entry. If they lie
at equal distances in one storage (`utils/stacked`), the [n, out, in] operand of the grouped kernel is a view of them;
otherwise it is stacked by copy. The weight gradients are one product too: added to main gradients, within backward or
later (`deferred_wgrad`), or handed to autograd as slices of one tensor. An expert without rows adds nothing, or gets a
gradient of zeros: the parameter still reports to whoever waits for it.

Rows behind the last group are never read; what the result holds there is undefined.

Legend: R rows, n experts of this rank.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from megatron.core import step_guard
from megatron.core.deferred_wgrad import WgradSink
from megatron.core.fusions.fused_wgrad import GroupedWgrad
from megatron.core.utils.stacked import stacked
from megatron.core.utils.upcast import upcast

# bytes to which the grouped kernel wants the strides of its operands aligned
_ALIGNMENT_BYTES = 16


def uses_grouped_kernel(rows: torch.Tensor, out_features: int) -> bool:
    """True if `grouped_linear` for rows [R, in] runs the kernel that reads its group ends on the device."""
    if not rows.is_cuda:
        # there it is slower, but it is the form of a step that must not read its counts
        return step_guard.active() is not None and rows.dtype in (torch.bfloat16, torch.float32)
    if rows.dtype != torch.bfloat16 or rows.shape[0] == 0:
        return False
    widths = (rows.shape[1], out_features)
    return all(width * rows.element_size() % _ALIGNMENT_BYTES == 0 for width in widths)


def grouped_linear(
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    tokens_per_expert: torch.Tensor,
    host_counts: list[int] | None = None,
    fuses_wgrad: bool = True,
) -> torch.Tensor:
    """Multiply each group of rows with its expert's matrix.

    Shapes: rows [R, in], weights n x [out, in], tokens_per_expert int [n] -> [R, out].
    Host:   the loop reads the counts (one wait on a GPU) unless `host_counts` gives them; the grouped kernel does not.
    Graph:  capturable in the grouped form.
    Memory: keeps rows and weights for backward.
    Grad:   rows and every weight; zeros for experts without rows. With `fuses_wgrad` weights that have a main gradient
            get theirs inside the product.
    """
    sink = WgradSink(weights, fuses_wgrad)
    if uses_grouped_kernel(rows, weights[0].shape[0]):
        ends = tokens_per_expert.to(rows.device).cumsum(0, dtype=torch.int32)
        return _GroupedKernel.apply(sink, rows, ends, *weights)
    counts = tokens_per_expert.tolist() if host_counts is None else host_counts
    return _GroupedLoop.apply(sink, rows, tuple(accumulate(counts)), *weights)


def _groups(ends: Iterable[int]) -> Iterable[tuple[int, int, int]]:
    """(expert, first row, end row) for every expert, empty ones included."""
    begin = 0
    for expert, end in enumerate(ends):
        yield expert, begin, end
        begin = end


class _GroupedLoop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sink: WgradSink, rows: torch.Tensor, ends: tuple[int, ...], *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, *weights)
        ctx.sink, ctx.ends = sink, ends
        out = rows.new_empty(rows.shape[0], weights[0].shape[0])
        for expert, begin, end in _groups(ends):
            if begin < end:
                torch.mm(rows[begin:end], weights[expert].t(), out=out[begin:end])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[1] else None
        for expert, begin, end in _groups(ctx.ends):
            if grad_rows is not None and begin < end:
                torch.mm(grad[begin:end], weights[expert], out=grad_rows[begin:end])
        return None, grad_rows, None, *_weight_grads(ctx, GroupedWgrad(grad, rows, ctx.ends))


class _GroupedKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sink: WgradSink, rows: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        ctx.sink = sink
        return torch._grouped_mm(rows.contiguous(), stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()  # the kernel refuses the stride 0 of an expanded gradient
        grad_rows = torch._grouped_mm(grad, stacked(weights), offs=ends) if ctx.needs_input_grad[1] else None
        return None, grad_rows, None, *_weight_grads(ctx, GroupedWgrad(grad, rows.contiguous(), ends))


def _weight_grads(ctx: Any, product: GroupedWgrad) -> Sequence[torch.Tensor | None]:
    """Hand the product [n, out, in] to the call's sink if any weight needs its gradient."""
    needed = ctx.needs_input_grad[3:]
    return ctx.sink.take(product) if any(needed) else [None] * len(needed)


def expert_of_row(tokens_per_expert: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Expert of each row, int [n] -> int64 [R]; n for rows behind the last group. Host: no synchronisation."""
    ends = tokens_per_expert.cumsum(0)
    rows = torch.arange(num_rows, device=tokens_per_expert.device)
    return torch.searchsorted(ends, rows, right=True)


def gather_bias(biases: Sequence[torch.Tensor], experts: torch.Tensor) -> torch.Tensor:
    """Bias of each row's expert: n x [out], experts int64 [R] -> [R, out] in fp32 at least; zeros where it is n.

    The result is wide so that the gradients of an expert's rows are summed before they are rounded.
    """
    return _GatherBias.apply(experts, *biases)


class _GatherBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, experts: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(experts)
        ctx.dtype = biases[0].dtype
        table = torch.stack([*biases, torch.zeros_like(biases[0])])
        return upcast(table).index_select(0, experts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (experts,) = ctx.saved_tensors
        num_experts = len(ctx.needs_input_grad) - 1
        # a product with 0/1 sums the rows of each expert in a fixed order; rows of no expert are cleared first
        members = torch.arange(num_experts, device=experts.device).unsqueeze(1) == experts  # [n, R]
        clean = torch.where((experts < num_experts).unsqueeze(1), grad, torch.zeros_like(grad))
        return None, *(members.to(grad.dtype) @ clean).to(ctx.dtype).unbind(0)
