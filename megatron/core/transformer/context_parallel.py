"""Core attention of a sequence whose positions are spread over context-parallel ranks.

Rank r of P holds queries, keys and values of chunks r and 2P - 1 - r (see `utils/zigzag`). Three ways to meet:

| `--cp-comm-type` | what travels                                | attention                                           |
|------------------|---------------------------------------------|-----------------------------------------------------|
| p2p              | keys and values, from rank to rank          | block by block, the next block on its way meanwhile |
| all_gather       | keys and values, all at once                | block by block                                      |
| a2a              | all of it, whole sequences for some heads   | as without context parallelism                      |

Blocks are taken in the order of their owners r, r - 1, ..., so p2p and all_gather do the same sums. What a causal mask
leaves of a block is one rectangle, or the triangle of a rank's own keys:

    owner == r    all own queries x all own keys, causal (own positions ascend, so the triangle is the usual one)
    owner <  r    all own queries x the owner's early chunk
    owner >  r    own late chunk  x all of the owner's keys

Gradients of keys and values are summed on the way to their owner, in fp32 at least.

Legend: S sequence, P ranks, s = S / P positions of this rank, b batch, n query heads, g key and value heads, d channels
of a head.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.core.fusions.fused_block_attention import BlockKernel, PlainKernel, join_block
from megatron.core.utils.collectives import all_gather, all_to_all, reduce_scatter, start_shift
from megatron.core.utils.divide import divide
from megatron.core.utils.upcast import upcast
from megatron.core.utils.zigzag import own_chunks, to_natural_order, to_rank_order

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool], torch.Tensor]
"""query [b, n, s, d], key and value [b, g, s, d], mask bool broadcastable to [b, 1, s, S], is_causal -> [b, n, s, d]"""


class Exchange(Protocol):
    """How keys and values get around, and how their gradients come home."""

    def rounds(self, pair: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (owner, its keys and values [2, b, g, s, d]) in the order of owners r, r - 1, ..."""
        ...

    def sum_at_owner(self, grads: Iterable[torch.Tensor]) -> torch.Tensor:
        """Take gradients [2, b, g, s, d] in the order of `rounds`; return the sum that belongs to this rank."""
        ...


class RingExchange:
    """Every pair goes once around; the next one is under way while the present one is used."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def rounds(self, pair: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (owner, its keys and values [2, b, g, s, d]) in the order of owners r, r - 1, ..."""
        rank, size = self.group.rank(), self.group.size()
        for step in range(size):
            shift = start_shift(pair, self.group) if step < size - 1 else None
            yield (rank - step) % size, pair
            if shift is not None:
                pair = shift.wait()

    def sum_at_owner(self, grads: Iterable[torch.Tensor]) -> torch.Tensor:
        """Take gradients [2, b, g, s, d] in the order of `rounds`; return the sum that belongs to this rank.

        What a rank has for an owner goes to the next rank, which has that owner's keys in its next round and adds its
        own share; after P shifts the sum is at home.
        """
        shift = None
        for grad in grads:
            total = grad if shift is None else grad.add_(shift.wait())
            shift = start_shift(total, self.group)
        assert shift is not None, "no gradients: a ring has at least one round"
        return shift.wait()


class GatherExchange:
    """All pairs come at once; they are gathered anew in backward instead of being kept."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def rounds(self, pair: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (owner, its keys and values [2, b, g, s, d]) in the order of owners r, r - 1, ..."""
        rank, size = self.group.rank(), self.group.size()
        gathered = pair.new_empty(size, *pair.shape)
        all_gather(gathered.flatten(0, 1), pair, self.group)
        for step in range(size):
            owner = (rank - step) % size
            yield owner, gathered[owner]

    def sum_at_owner(self, grads: Iterable[torch.Tensor]) -> torch.Tensor:
        """Take gradients [2, b, g, s, d] in the order of `rounds`; return the sum that belongs to this rank."""
        rank, size = self.group.rank(), self.group.size()
        by_owner = None
        for step, grad in enumerate(grads):
            by_owner = grad.new_empty(size, *grad.shape) if by_owner is None else by_owner
            by_owner[(rank - step) % size] = grad
        assert by_owner is not None, "no gradients: there is at least one round"
        total = torch.empty_like(by_owner[0])
        reduce_scatter(total, by_owner.flatten(0, 1), self.group)
        return total


@dataclass(frozen=True)
class BlockAttention:
    """Attention block by block."""

    rank: int
    size: int
    exchange: Exchange
    kernel: BlockKernel
    masked_kernel: BlockKernel
    """In place of `kernel` where a mask is given."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """Query [b, n, s, d], key and value [b, g, s, d], mask bool broadcastable to [b, 1, s, S] -> [b, n, s, d]."""
        if mask is not None:
            mask = mask.expand(-1, -1, query.shape[2], self.size * key.shape[2])
        return _BlockwiseAttention.apply(query, key, value, mask, is_causal, self)


@dataclass(frozen=True)
class _Block:
    """The part of an owner's keys that is seen, and by which queries."""

    queries: slice
    keys: slice
    is_triangle: bool

    @classmethod
    def of(cls, owner: int, rank: int, length: int, is_causal: bool) -> "_Block":
        """The block of `owner` for the queries of `rank`, both of `length` positions."""
        all_rows = slice(0, length)
        if not is_causal or owner == rank:
            return cls(all_rows, all_rows, is_causal)
        if owner < rank:
            return cls(all_rows, slice(0, length // 2), False)
        return cls(slice(length // 2, length), all_rows, False)


class _BlockwiseAttention(torch.autograd.Function):
    """Keeps queries, own keys and values, output and lse; never scores, nor the keys of other ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        way: BlockAttention,
    ) -> torch.Tensor:
        pair = torch.stack((key, value))
        kernel = way.kernel if mask is None else way.masked_kernel
        out = lse = None
        for owner, others in way.exchange.rounds(pair):
            block = _Block.of(owner, way.rank, query.shape[2], is_causal)
            hidden = _mask_of(mask, block, owner, way.size)
            rows, keys = query[:, :, block.queries], others[:, :, :, block.keys]
            block_out, block_lse = kernel.forward(rows, keys[0], keys[1], hidden, block.is_triangle)
            if out is None or lse is None:  # own keys come first, and all queries look at them
                out, lse = upcast(block_out), block_lse
            else:
                join_block(out[:, :, block.queries], lse[:, :, block.queries], block_out, block_lse)
        assert out is not None, "no rounds: a rank has at least its own keys"
        result = out.to(query.dtype)
        ctx.save_for_backward(query, pair, mask, result, lse)
        ctx.is_causal, ctx.way = is_causal, way
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, pair, mask, result, lse = ctx.saved_tensors
        way: BlockAttention = ctx.way
        grad = grad_outputs[0]
        kernel = way.kernel if mask is None else way.masked_kernel
        grad_query = upcast(torch.zeros_like(query))

        def shares() -> Iterator[torch.Tensor]:
            """Gradients of each owner's keys and values [2, b, g, s, d]."""
            for owner, others in way.exchange.rounds(pair):
                block = _Block.of(owner, way.rank, query.shape[2], ctx.is_causal)
                hidden = _mask_of(mask, block, owner, way.size)
                seeing, keys = block.queries, others[:, :, :, block.keys]
                joined = result[:, :, seeing], lse[:, :, seeing]
                to_query, to_key, to_value = kernel.backward(
                    grad[:, :, seeing], query[:, :, seeing], (keys[0], keys[1]), joined, hidden, block.is_triangle
                )
                grad_query[:, :, seeing] += to_query
                share = upcast(torch.zeros_like(pair))
                share[0, :, :, block.keys], share[1, :, :, block.keys] = to_key, to_value
                yield share

        grad_pair = way.exchange.sum_at_owner(shares()).to(pair.dtype)
        return grad_query.to(query.dtype), grad_pair[0], grad_pair[1], None, None, None


def _mask_of(mask: torch.Tensor | None, block: _Block, owner: int, size: int) -> torch.Tensor | None:
    """Cut the block out of the mask of own queries [b, 1, s, S] -> [b, 1, queries, keys]."""
    return None if mask is None else own_chunks(mask, 3, owner, size)[:, :, block.queries, block.keys]


@dataclass(frozen=True)
class HeadExchange:
    """Ranks swap positions for heads, so that each has whole sequences of its share of the heads, and back."""

    group: dist.ProcessGroup
    attend_whole: Attend

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """Query [b, n, s, d], key and value [b, g, s, d], mask bool broadcastable to [b, 1, s, S] -> [b, n, s, d]."""
        mask = None if mask is None else self._gather_rows(mask, query.shape[2])
        query, key, value = (_Swap.apply(tensor, self.group, True) for tensor in (query, key, value))
        return _Swap.apply(self.attend_whole(query, key, value, mask, is_causal), self.group, False)

    def _gather_rows(self, mask: torch.Tensor, length: int) -> torch.Tensor:
        """Mask of own queries, bool [b, 1, s or 1, S] -> of all queries, bool [b, 1, S, S]."""
        rows = mask.expand(-1, -1, length, -1).movedim(2, 0).contiguous().view(torch.uint8)  # [s, b, 1, S]
        gathered = rows.new_empty(self.group.size(), *rows.shape)
        all_gather(gathered.flatten(0, 1), rows, self.group)
        return to_natural_order(gathered).view(torch.bool).movedim(0, 2)


class _Swap(torch.autograd.Function):
    """[b, n, s, d] -> [b, n / P, S, d], or the way back; each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, group: dist.ProcessGroup, to_whole: bool) -> torch.Tensor:
        ctx.group, ctx.to_whole = group, to_whole
        return _to_whole_sequence(heads, group) if to_whole else _to_own_positions(heads, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = _to_own_positions if ctx.to_whole else _to_whole_sequence
        return back(grad_outputs[0], ctx.group), None, None


def _to_whole_sequence(heads: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All heads of own positions [b, n, s, d] -> own heads of all positions [b, n / P, S, d]."""
    share = divide(heads.shape[1], group.size())
    # [b, n, s, d] -> [P, s, b, n / P, d]: piece p is for rank p
    pieces = heads.unflatten(1, (group.size(), share)).permute(1, 3, 0, 2, 4).contiguous()
    received = torch.empty_like(pieces)
    all_to_all(received, pieces, group)
    return to_natural_order(received).permute(1, 2, 0, 3)


def _to_own_positions(heads: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Own heads of all positions [b, n / P, S, d] -> all heads of own positions [b, n, s, d]."""
    pieces = to_rank_order(heads.permute(2, 0, 1, 3), group.size()).contiguous()  # [P, s, b, n / P, d]
    received = torch.empty_like(pieces)
    all_to_all(received, pieces, group)
    return received.permute(2, 0, 3, 1, 4).flatten(1, 2)


_EXCHANGES: dict[str, Callable[[dist.ProcessGroup], Exchange]] = {"p2p": RingExchange, "all_gather": GatherExchange}


def build_context_parallel(
    comm_type: str, group: dist.ProcessGroup, kernel: BlockKernel, masked_kernel: PlainKernel, attend_whole: Attend
) -> BlockAttention | HeadExchange:
    """Return the attention over the ranks of `group` that `--cp-comm-type` names."""
    if comm_type == "a2a":
        return HeadExchange(group, attend_whole)
    return BlockAttention(group.rank(), group.size(), _EXCHANGES[comm_type](group), kernel, masked_kernel)
