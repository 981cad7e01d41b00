"""Attention of queries to one block of keys, with what is needed to join the results of several blocks.

A query with scores x_j against the keys of a block gives

    out = sum_j softmax(x)_j v_j          lse = log sum_j exp x_j

Results of two blocks join without a second look at keys or values:

    lse = log(exp lse_1 + exp lse_2)      out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

Backward goes block by block as well. With the joined out and lse, p_j = exp(x_j - lse) are the probabilities over all
blocks, and every block adds its share:

    dv_j = p_j dout      dx_j = p_j (dout . v_j - dout . out)      dq += dx_j k_j      dk_j = dx_j q

Legend: b batch, n query heads, g key and value heads, r = n / g, q queries, k keys, d channels of a head.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.core.utils.upcast import upcast


class BlockKernel(Protocol):
    """Forward and backward of one block; `is_causal` hides later keys from equally many queries."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, n, q, d], [b, g, k, d], mask bool [b or 1, 1, q, k] -> out [b, n, q, d], lse fp32 at least [b, n, q]."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        pair: tuple[torch.Tensor, torch.Tensor],
        joined: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradient and joined out [b, n, q, d], joined lse [b, n, q] -> gradients of query, key and value."""
        ...


@dataclass(frozen=True)
class PlainKernel:
    """Matrix products in fp32 at least, for any dtype on any device; no score overflows in fp16."""

    scale: float

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, n, q, d], [b, g, k, d], mask bool [b or 1, 1, q, k] -> out and lse, fp32 at least."""
        scores = self._scores(_by_group(query, key), key, mask, is_causal)
        # A query that sees no key of this block has lse = the lowest number, weight 0 where blocks join, and out 0.
        lse = torch.logsumexp(scores, dim=-1).clamp(min=torch.finfo(scores.dtype).min)
        probs = torch.exp(scores - lse.unsqueeze(-1))
        return torch.matmul(probs, upcast(value).unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        pair: tuple[torch.Tensor, torch.Tensor],
        joined: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradient and joined out [b, n, q, d], joined lse [b, n, q] -> gradients of all three, fp32 at least."""
        key, value = pair
        grad, query, out = (_by_group(tensor, key) for tensor in (grad, query, joined[0]))
        lse = joined[1].unflatten(1, (key.shape[1], -1)).unsqueeze(-1)
        probs = torch.exp(self._scores(query, key, mask, is_causal) - lse)  # [b, g, r, q, k]
        grad_probs = torch.matmul(grad, upcast(value).unsqueeze(2).mT)
        share = (grad * out).sum(-1, keepdim=True)
        grad_scores = probs * (grad_probs - share) * self.scale
        grad_query = torch.matmul(grad_scores, upcast(key).unsqueeze(2)).flatten(1, 2)
        return grad_query, torch.matmul(grad_scores.mT, query).sum(2), torch.matmul(probs.mT, grad).sum(2)

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        """[b, g, r, q, d], [b, g, k, d], mask bool [b or 1, 1, q, k] -> [b, g, r, q, k], -inf where hidden."""
        scores = torch.matmul(query * self.scale, upcast(key).unsqueeze(2).mT)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
            mask = later if mask is None else mask | later
        if mask is None:
            return scores
        return scores.masked_fill(mask.unsqueeze(2) if mask.dim() == 4 else mask, -torch.inf)


@dataclass(frozen=True)
class FlashKernel:
    """Torch's flash kernel, on a GPU in bf16 or fp16; repeats bit for bit under use_deterministic_algorithms."""

    scale: float

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, n, q, d], [b, g, k, d] -> out [b, n, q, d], lse fp32 [b, n, q]."""
        assert mask is None, "the flash kernel takes no mask"
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = flash(query, key, value, 0.0, is_causal, scale=self.scale)[:2]
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        pair: tuple[torch.Tensor, torch.Tensor],
        joined: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradient and joined out [b, n, q, d], joined lse [b, n, q] -> gradients of query, key and value."""
        assert mask is None, "the flash kernel takes no mask"
        lengths = (query.shape[2], pair[0].shape[2])
        out, lse = joined[0], joined[1].contiguous()  # the kernel reads a part of lse as if it were whole
        no_dropout = query.new_empty(0, dtype=torch.int64)  # stands for the random state, which is not read
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, *pair, out, lse, None, None, *lengths, 0.0, is_causal, no_dropout, no_dropout),
            scale=self.scale,
        )


def join_block(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Join one block's out [b, n, q, d] and lse [b, n, q] to those so far, in place; those are fp32 or wider."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    out.add_(block_out * torch.exp(block_lse - total).unsqueeze(-1))
    lse.copy_(total)


def _by_group(heads: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Put the query heads of a key head together, fp32 at least: [b, n, q, d], [b, g, k, d] -> [b, g, r, q, d]."""
    return upcast(heads).unflatten(1, (key.shape[1], -1))
