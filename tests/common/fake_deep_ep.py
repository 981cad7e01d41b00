"""A stand-in for the package deep_ep on gloo ranks: the classes that the adapters use, with the arguments passed.

It moves tokens by gathering everything everywhere, and is strict where the library is: bf16 and contiguous rows, equal
and rounded token counts, a handle for each dispatch, a number of rows unless the call blocks. Signatures follow
DeepEP 1.2.1 (HybridEPBuffer: branch hybrid-ep, commit 94a9f8f). What it cannot show is that the real kernels run.
"""

import dataclasses
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import optional_deps


def install() -> types.ModuleType:
    """Make `import deep_ep` find the stand-in in this process."""
    module = types.ModuleType("deep_ep")
    module.HybridEPBuffer, module.Buffer = HybridEPBuffer, Buffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
    optional_deps._attempt.cache_clear()
    return module


def uninstall() -> None:
    """Undo `install`."""
    sys.modules.pop("deep_ep", None)
    optional_deps._attempt.cache_clear()


def _everywhere(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The tensors of all ranks, whatever their lengths."""
    if group is None:
        return [tensor]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, tensor, group=group)
    return found


def _require(tensor: torch.Tensor) -> None:
    assert tensor.dtype == torch.bfloat16, f"rows are {tensor.dtype}"
    assert tensor.is_contiguous(), "rows are not contiguous"


class HybridEPBuffer:
    """Dispatch with permutation; rows by expert, source rank, token."""

    def __init__(
        self,
        group,
        hidden_dim,
        max_num_of_tokens_per_rank,
        num_local_experts,
        num_sms_dispatch_api=None,
        num_sms_combine_api=None,
    ):
        self.group, self.hidden_dim, self.num_local_experts = group, hidden_dim, num_local_experts
        self.capacity = max_num_of_tokens_per_rank
        self.rank = 0 if group is None else group.rank()

    def dispatch_with_permute(
        self,
        *,
        hidden,
        routing_map=None,
        probs=None,
        num_permuted_tokens=None,
        pad_multiple=None,
        handle=None,
        non_blocking=False,
    ):
        """(rows [P, h], probs [P] or None, None, padded tokens per expert, handle of 11 fields)."""
        _require(hidden)
        num_tokens, multiple = hidden.shape[0], pad_multiple or 1
        assert num_tokens <= self.capacity, f"{num_tokens} tokens, capacity {self.capacity}"
        assert num_tokens % 64 == 0, f"{num_tokens} tokens: no multiple of a chunk"
        assert num_permuted_tokens is not None or not (non_blocking or handle is not None), "no number of rows"
        if handle is None:
            maps = _everywhere(routing_map, self.group)
            assert len({len(one) for one in maps}) == 1, "token counts differ between ranks"
            places, counts = self._places(torch.cat(maps), multiple)
            num_rows = num_permuted_tokens if num_permuted_tokens is not None else int(counts.sum())
            overflow = torch.tensor([int(counts.sum() > num_rows)], dtype=torch.int32)
            handle = (places[:num_rows], *[None] * 5, torch.cat(maps), None, num_tokens, None, overflow)
        else:
            counts, num_rows = None, num_permuted_tokens
        places = handle[0]
        rows = hidden.new_full((num_rows, hidden.shape[1]), float("nan"))
        rows[: len(places)] = 0
        everything = torch.cat(_everywhere(hidden, self.group))
        is_real = places >= 0
        rows[: len(places)][is_real] = everything[places[is_real] // self.num_local_experts]
        row_probs = None
        if probs is not None:
            first = self.rank * self.num_local_experts
            local = torch.cat(_everywhere(probs, self.group))[:, first : first + self.num_local_experts].flatten()
            row_probs = local.new_full((num_rows,), float("nan"))
            row_probs[: len(places)] = torch.where(is_real, local[places.clamp(min=0)], 0)
        return rows, row_probs, None, counts, handle

    def _places(self, routing_map, multiple):
        """Entry token * n + expert of each row, -1 for padding, and the padded counts."""
        places, counts, first = [], [], self.rank * self.num_local_experts
        for expert in range(self.num_local_experts):
            mine = routing_map[:, first + expert].nonzero().flatten() * self.num_local_experts + expert
            padding = -len(mine) % multiple
            places.append(torch.cat([mine, mine.new_full((padding,), -1)]))
            counts.append(len(places[-1]))
        return torch.cat(places), torch.tensor(counts)

    def combine_with_unpermute(self, *, hidden, probs=None, handle=None, pad_multiple=None):
        """(tokens [N, h], probs [N, E] or None)."""
        _require(hidden)
        places, maps, num_tokens = handle[0], handle[6], handle[8]
        is_real = places >= 0
        tokens, experts = places[is_real] // self.num_local_experts, places[is_real] % self.num_local_experts
        total = torch.zeros(len(maps), hidden.shape[1]).index_add_(0, tokens, hidden[: len(places)][is_real].float())
        mine = slice(self.rank * num_tokens, (self.rank + 1) * num_tokens)
        combined = sum(part[mine] for part in _everywhere(total, self.group)).bfloat16()
        if probs is None:
            return combined, None
        assert probs.dtype == torch.float32, f"probabilities are {probs.dtype}"
        dense = torch.zeros(maps.shape)
        dense[tokens, self.rank * self.num_local_experts + experts] = probs[: len(places)][is_real]
        return combined, sum(part[mine] for part in _everywhere(dense, self.group))


@dataclasses.dataclass
class _Config:
    """Sizes that the library recommends."""

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer:
    """Dispatch without permutation; copies by source rank, token."""

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        assert num_nvl_bytes > 0, "no buffer"
        self.group = group
        self.rank, self.num_ranks = (0, 1) if group is None else (group.rank(), group.size())

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0, "an odd number of SMs"

    @staticmethod
    def get_dispatch_config(num_ranks):
        return _Config()

    @staticmethod
    def get_combine_config(num_ranks):
        return _Config()

    def get_dispatch_layout(self, topk_idx, num_experts):
        """(tokens per rank, None, tokens per expert, bool [T, W], event)."""
        assert topk_idx.dtype == torch.int64, f"ids are {topk_idx.dtype}"
        ranks = torch.where(topk_idx < 0, self.num_ranks, topk_idx // (num_experts // self.num_ranks))
        in_rank = torch.zeros(len(topk_idx), self.num_ranks + 1, dtype=torch.bool).scatter_(1, ranks, True)[:, :-1]
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank.contiguous(), None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
    ):
        """(copies [C, h], local ids [C, K] or None, weights [C, K] or None, counts, handle, event)."""
        _require(x)
        rows = _everywhere(x, self.group)
        if handle is not None:
            return torch.cat([r[m] for r, m in zip(rows, handle[0], strict=True)]), None, None, [], handle, None
        assert topk_weights.dtype == torch.float32, f"weights are {topk_weights.dtype}"
        in_ranks = _everywhere(is_token_in_rank, self.group)
        masks = [one[:, self.rank] for one in in_ranks]
        count = len(num_tokens_per_expert) // self.num_ranks
        ids = torch.cat([i[m] for i, m in zip(_everywhere(topk_idx, self.group), masks, strict=True)])
        weights = torch.cat([w[m] for w, m in zip(_everywhere(topk_weights, self.group), masks, strict=True)])
        local = ids - self.rank * count
        is_local = (local >= 0) & (local < count) & (ids >= 0)
        local = local.masked_fill(~is_local, -1)
        per_expert = torch.bincount(local[is_local], minlength=count).tolist()
        copies = torch.cat([r[m] for r, m in zip(rows, masks, strict=True)])
        return copies, local, weights.masked_fill(~is_local, 0), per_expert, (masks, in_ranks), None

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
    ):
        """(tokens [T, h], weights [T, K] or None, event)."""
        _require(x)
        masks, in_ranks = handle
        sizes = [int(mask.sum()) for mask in masks]
        mine = in_ranks[self.rank]

        def back(rows):
            total = torch.zeros(len(mine), rows.shape[1])
            for source, pieces in enumerate(_everywhere(rows.split(sizes), self.group)):
                total[mine[:, source]] += pieces[self.rank].float()
            return total

        weights = None if topk_weights is None else back(topk_weights)
        return back(x).bfloat16(), weights, None
