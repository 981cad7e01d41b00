"""Cross entropy over logits whose vocabulary is split over the tensor-parallel ranks.

    loss = log(sum_j exp(x_j - m)) - (x_target - m),  m = max_j x_j
    d loss / d x_j = softmax(x)_j - [j == target]

j runs over the real vocabulary only: rows that pad the table to a convenient size are left out of the sum and get a
zero gradient, so that the loss does not depend on the padding. The maths is fp32 at least.

Legend: s sequence, b batch, v padded vocabulary, r real vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.tensor_parallel.partition import require_single_rank
from megatron.core.utils.upcast import wide_dtype


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Keeps the softmax [s, b, r] and the targets for backward, never the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, num_real: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Shapes: logits [s, b, v], target int64 [s, b] -> [s, b]."""
        real = logits[..., :num_real].to(dtype)
        shifted = real - real.amax(dim=-1, keepdim=True)
        predicted = shifted.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        softmax = shifted.exp_()
        total = softmax.sum(dim=-1, keepdim=True)
        softmax.div_(total)
        ctx.save_for_backward(softmax, target)
        ctx.num_filler, ctx.logits_dtype = logits.shape[-1] - num_real, logits.dtype
        return total.squeeze(-1).log_().sub_(predicted)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Shapes: grad [s, b] -> [s, b, v]."""
        (grad,) = grad_outputs
        softmax, target = ctx.saved_tensors
        scale = grad.unsqueeze(-1)
        result = (softmax * scale).scatter_add_(-1, target.unsqueeze(-1), -scale).to(ctx.logits_dtype)
        return F.pad(result, (0, ctx.num_filler)) if ctx.num_filler else result, None, None, None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    true_vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the loss of each token.

    Shapes: vocab_parallel_logits [s, b, v], target int64 [s, b] -> [s, b].
    Dtype:  computed and returned in `dtype`; by default fp32, or fp64 for fp64 logits.
    Memory: keeps the softmax [s, b, r] in that dtype for backward.
    Args: true_vocab_size is r, by default v.
    Raises: ConfigError if the group has more than one rank.
    """
    require_single_rank(tp_group, "vocab_parallel_cross_entropy")
    num_real = vocab_parallel_logits.shape[-1] if true_vocab_size is None else true_vocab_size
    used_dtype = wide_dtype(vocab_parallel_logits.dtype) if dtype is None else dtype
    return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, num_real, used_dtype)
