"""Cross entropy over logits whose vocabulary is split over the tensor-parallel ranks.

    loss = log(sum_j exp(x_j - m)) - (x_target - m),  m = max_j x_j
    d loss / d x_j = softmax(x)_j - [j == target]

j runs over the real vocabulary only: rows that pad the table to a convenient size are left out of the sum and get a
zero gradient, so that the loss does not depend on the padding. The maths is fp32 at least.

Over several ranks the maximum is one all-reduce, the sum and the target's score together are another one. The fused
form does the same with kernels that read the logits once in each direction (`fused_cross_entropy`).

Legend: s sequence, b batch, v padded vocabulary of this rank, r its real rows (one column of -inf if it has none).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.fusions.fused_cross_entropy import (
    VocabularyPart,
    logit_gradient,
    scan_logits,
    uses_loss_kernels,
)
from megatron.core.utils.collectives import MAX, all_reduce
from megatron.core.utils.groups import group_rank, group_size
from megatron.core.utils.upcast import wide_dtype


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Keeps the softmax [s, b, r] and the targets for backward, never the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        num_real: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Shapes: logits [s, b, v], target int64 [s, b] -> [s, b]."""
        index, is_foreign, num_local = _place_targets(target, logits.shape[-1], num_real, group)
        real = logits[..., : max(num_local, 1)].to(dtype)
        if num_local == 0:
            real = torch.full_like(real, -torch.inf)
        peak = real.amax(dim=-1)
        all_reduce(peak, group, MAX)
        shifted = real - peak.unsqueeze(-1)
        predicted = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        softmax = shifted.exp_()
        total = softmax.sum(dim=-1)
        if is_foreign is not None:
            both = torch.stack([predicted.masked_fill(is_foreign, 0.0), total])
            all_reduce(both, group)
            predicted, total = both.unbind()
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, index, is_foreign)
        ctx.num_filler, ctx.logits_dtype = logits.shape[-1] - real.shape[-1], logits.dtype
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Shapes: grad [s, b] -> [s, b, v]."""
        (grad,) = grad_outputs
        softmax, index, is_foreign = ctx.saved_tensors
        at_target = grad if is_foreign is None else grad.masked_fill(is_foreign, 0.0)
        result = (softmax * grad.unsqueeze(-1)).scatter_add_(-1, index.unsqueeze(-1), -at_target.unsqueeze(-1))
        result = result.to(ctx.logits_dtype)
        return F.pad(result, (0, ctx.num_filler)) if ctx.num_filler else result, None, None, None, None


class _FusedCrossEntropy(torch.autograd.Function):
    """Keeps the logits as they are, and for each token its target, maximum and sum in fp32."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, num_real: int, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """Shapes: logits [s, b, v], target int64 [s, b] -> fp32 [s, b]."""
        width = logits.shape[-1]
        first = group_rank(group) * width
        part = VocabularyPart(first, min(max(num_real - first, 0), width), num_real)
        found = scan_logits(logits.reshape(-1, width), target.reshape(-1), part)
        peak, total, score = found.unbind()
        if group_size(group) > 1:
            own = peak.clone()
            all_reduce(peak, group, MAX)
            total *= torch.exp(own - peak)
            all_reduce(found[1:], group)
        ctx.save_for_backward(logits, target, peak, total)
        ctx.part = part
        return (total.log() - (score - peak)).view(target.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Shapes: grad [s, b] -> [s, b, v] in the dtype of the logits."""
        logits, target, peak, total = ctx.saved_tensors
        rows, ids, grad = logits.reshape(-1, logits.shape[-1]), target.reshape(-1), grad_outputs[0].reshape(-1)
        return logit_gradient(rows, ids, (peak, total), grad, ctx.part).view(logits.shape), None, None, None


def _place_targets(
    target: torch.Tensor, rows: int, num_real: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Return (column of each target here, where it is another rank's, real rows of this rank): int64 and bool [s, b].

    A foreign target points at column 0. On one rank nothing is foreign and the second result is None.
    """
    if group_size(group) == 1:
        return target, None, num_real
    first = group_rank(group) * rows
    num_local = min(max(num_real - first, 0), rows)
    local = target - first
    is_foreign = (local < 0) | (local >= num_local)
    return local.masked_fill(is_foreign, 0), is_foreign, num_local


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    true_vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    fuses: bool = False,
) -> torch.Tensor:
    """Return the loss of each token, the same on all ranks of the group.

    Shapes: vocab_parallel_logits [s, b, v], target int64 [s, b] (ids of the whole vocabulary) -> [s, b].
    Dtype:  computed and returned in `dtype`; by default fp32, or fp64 for fp64 logits.
    Memory: keeps the softmax [s, b, r] in that dtype for backward; the kernels keep the logits instead.
    Args: true_vocab_size counts the real rows of all ranks, by default all rows are real. `fuses` asks for the kernels,
        which a GPU has for fp32 losses; elsewhere the plain form runs. Both differ in the rounding of fp32 alone.
    """
    num_rows = vocab_parallel_logits.shape[-1] * group_size(tp_group)
    num_real = num_rows if true_vocab_size is None else true_vocab_size
    used_dtype = wide_dtype(vocab_parallel_logits.dtype) if dtype is None else dtype
    if fuses and uses_loss_kernels(vocab_parallel_logits, used_dtype):
        return _FusedCrossEntropy.apply(vocab_parallel_logits, target, num_real, tp_group)
    return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, num_real, used_dtype, tp_group)
