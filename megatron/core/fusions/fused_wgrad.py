"""Weight gradients that are added to main gradients without being rounded in between.

    main_grad += dy^T x                              dense
    main_grad[e] += dy[rows of e]^T x[rows of e]     grouped: the rows lie sorted by expert

Operands are bf16 or fp16, main gradients usually fp32: rounding each microbatch's product to bf16 before it is added
would lose what the wide buffer is for. The plain form widens the operands. On a GPU the dense product is one cuBLAS
call that reads and writes the main gradient, the grouped product a kernel of ours (`grouped_wgrad`).

A group without rows leaves its main gradient as it is, bit for bit. Rows behind the last group are never read.

Legend: R rows, n experts of this rank, in and out features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron.core import step_guard
from megatron.core.fusions.grouped_wgrad import grouped_wgrad, uses_wgrad_kernel
from megatron.core.utils.stacked import stacked_view
from megatron.core.utils.upcast import upcast


def accumulate_wgrad(
    main_grad: torch.Tensor,
    grad: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor | Sequence[int] | None = None,
) -> None:
    """Add a weight gradient to `main_grad` in place.

    Shapes: main_grad [out, in], grad [R, out], rows [R, in]; with the group ends int [n]: main_grad [n, out, in].
    Dtype:  fp32 at least inside; one rounding to the dtype of `main_grad`.
    Host:   no synchronisation in the dense form and, where `uses_wgrad_kernel`, in the grouped one; otherwise it
            reads `ends` if they are a tensor.
    """
    if ends is None:
        _accumulate_dense(main_grad, grad, rows)
        return
    if isinstance(ends, torch.Tensor) and uses_wgrad_kernel(main_grad, grad, rows):
        grouped_wgrad(main_grad, grad, rows, ends)
        return
    if isinstance(ends, torch.Tensor) and not grad.is_cuda and step_guard.active() is not None:
        main_grad.add_(torch._grouped_mm(upcast(grad).t(), upcast(rows), offs=ends))  # reads nothing, as on a GPU
        return
    limits = ends.tolist() if isinstance(ends, torch.Tensor) else list(ends)
    for expert, (begin, end) in enumerate(pairwise([0, *limits])):
        if begin < end:
            _accumulate_dense(main_grad[expert], grad[begin:end], rows[begin:end])


def _accumulate_dense(main_grad: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    """Main_grad [out, in] += grad^T [R, out] rows [R, in]."""
    if not main_grad.is_cuda:
        main_grad.add_(upcast(grad).t().matmul(upcast(rows)))
    elif main_grad.dtype == grad.dtype:
        torch.addmm(main_grad, grad.t(), rows, out=main_grad)
    else:
        torch.addmm(main_grad, grad.t(), rows, out_dtype=main_grad.dtype, out=main_grad)


@dataclass(frozen=True)
class DenseWgrad:
    """The weight gradient of one matrix: grad [R, out], rows [R, in]."""

    grad: torch.Tensor
    rows: torch.Tensor

    def compute(self) -> list[torch.Tensor]:
        """Return [[out, in]] in the dtype of the operands."""
        return [self.grad.t().matmul(self.rows)]

    def add_to(self, main_grads: Sequence[torch.Tensor]) -> None:
        """Add to the one main gradient [out, in]."""
        accumulate_wgrad(main_grads[0], self.grad, self.rows)


@dataclass(frozen=True)
class GroupedWgrad:
    """The weight gradients of n matrices: grad [R, out], rows [R, in] sorted by matrix, group ends int [n]."""

    grad: torch.Tensor
    rows: torch.Tensor
    ends: torch.Tensor | tuple[int, ...]
    """A device tensor where the grouped kernel runs, else numbers on the host."""

    def compute(self) -> list[torch.Tensor]:
        """N gradients [out, in] in the dtype of the operands, slices of one tensor; zeros for empty groups."""
        if isinstance(self.ends, torch.Tensor):
            return list(torch._grouped_mm(self.grad.t(), self.rows, offs=self.ends).unbind(0))
        grads = self.rows.new_empty(len(self.ends), self.grad.shape[1], self.rows.shape[1])
        for expert, (begin, end) in enumerate(pairwise([0, *self.ends])):
            # a product over zero rows is a matrix of zeros
            torch.mm(self.grad[begin:end].t(), self.rows[begin:end], out=grads[expert])
        return list(grads.unbind(0))

    def add_to(self, main_grads: Sequence[torch.Tensor]) -> None:
        """Add to n main gradients [out, in], at best the slices of one tensor."""
        view = stacked_view(main_grads)
        if view is not None:
            accumulate_wgrad(view, self.grad, self.rows, self.ends)
            return
        copy = torch.stack(list(main_grads))
        accumulate_wgrad(copy, self.grad, self.rows, self.ends)
        for main_grad, part in zip(main_grads, copy.unbind(0), strict=True):
            main_grad.copy_(part)
