"""Engines on DeepEP: `HybridEPBuffer` (engine deep_ep) and `Buffer` (backend deepep).

Neither has run against the real library here: it is not installed where this tree is tested. The tests run both
adapters against a stand-in whose signatures are the table `SIGNATURES`, taken from the sources named there; the library
that is found is compared with the same table before anything is built.

    deep_ep          dispatch and expansion in the library; row budget or exact sizes
    deep_ep_buffer   one copy per rank by the library, expansion by our kernels; exact sizes

What the library demands and the adapters see to: bf16 rows, contiguous; as many tokens on every rank and a multiple of
a chunk of them (tokens are padded with zeros that no expert takes); buffers that grow on all ranks at once, which ends
a capture; one stream for all calls, which the scheduler sees to; handles that are kept as they are, never looked into,
but for the overflow flag of a handle whose length is the one that was verified.

The library's combine adds up a token's rows in fp32 across experts and ranks: within (ranks hit + 1) bf16 roundings of
the exact sum, but not bit for bit what the other engines give.

Legend: T tokens of this rank, N tokens per rank in the library, K slots, h width, W ranks, n experts on each, P rows.
"""

import dataclasses
import inspect
from types import ModuleType
from typing import Any

import torch

from megatron.core import optional_deps
from megatron.core.errors import ConfigError
from megatron.core.fusions.fused_permute import gather_rows, sum_rows
from megatron.core.fusions.fused_row_layout import RowLayout, row_layout
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup, HybridEPEngine
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange, round_up
from megatron.core.transformer.moe.dispatchers.token_counts import most_tokens

CHUNK_TOKENS = 64
"""Tokens are padded to a multiple of this, which satisfies the library for any number of ranks."""

HANDLE_LENGTH = 11
"""Fields of HybridEPBuffer's handle in the version of the table; its last one is the overflow flag."""

SIGNATURES: dict[tuple[str, str], tuple[str, ...]] = {
    ("HybridEPBuffer", "__init__"): (
        "group",
        "hidden_dim",
        "max_num_of_tokens_per_rank",
        "num_local_experts",
        "num_sms_dispatch_api",
        "num_sms_combine_api",
    ),
    ("HybridEPBuffer", "dispatch_with_permute"): (
        "hidden",
        "routing_map",
        "probs",
        "num_permuted_tokens",
        "pad_multiple",
        "handle",
        "non_blocking",
    ),
    ("HybridEPBuffer", "combine_with_unpermute"): ("hidden", "probs", "handle", "pad_multiple"),
    ("Buffer", "__init__"): ("group", "num_nvl_bytes", "num_rdma_bytes"),
    ("Buffer", "get_dispatch_config"): ("num_ranks",),
    ("Buffer", "get_combine_config"): ("num_ranks",),
    ("Buffer", "set_num_sms"): ("new_num_sms",),
    ("Buffer", "get_dispatch_layout"): ("topk_idx", "num_experts"),
    ("Buffer", "dispatch"): (
        "x",
        "handle",
        "num_tokens_per_rank",
        "num_tokens_per_rdma_rank",
        "is_token_in_rank",
        "num_tokens_per_expert",
        "topk_idx",
        "topk_weights",
    ),
    ("Buffer", "combine"): ("x", "handle", "topk_weights"),
}
"""Arguments that the adapters pass: HybridEPBuffer of DeepEP 1.2.1 (branch hybrid-ep, 94a9f8f), Buffer of 1.2.1."""


def missing_arguments(library: Any, class_name: str) -> list[str]:
    """What the adapters pass to a class of the library and it does not take, as `Class.method(argument)`."""
    found = getattr(library, class_name, None)
    if found is None:
        return [class_name]
    missing = []
    for (owner, method), arguments in SIGNATURES.items():
        if owner == class_name:
            function = getattr(found, method, None)
            known = inspect.signature(function).parameters if function else {}
            missing += [f"{owner}.{method}({name})" for name in arguments if name not in known]
    return missing


class _DeepEPEngine(HybridEPEngine):
    """What the two adapters share."""

    library_class = ""
    needed_by = ""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._library: Any = self.require_packages()
        self._buffer: Any = None
        self._capacity = 0

    @classmethod
    def require_packages(cls) -> ModuleType:
        """The library; raises MissingDependencyError with the step that installs it."""
        return optional_deps.require("deep_ep", cls.needed_by)

    @classmethod
    def why_unavailable(cls, setup: EngineSetup) -> str | None:
        """Look at the installed library and at the sizes that it takes."""
        if not optional_deps.is_available("deep_ep"):
            return "the package 'deep_ep' cannot be imported"
        missing = missing_arguments(optional_deps.require("deep_ep"), cls.library_class)
        if missing:
            return f"deep_ep: this version has no {', '.join(missing)}"
        if setup.hidden_size % 16:
            return f"hidden_size={setup.hidden_size}: no multiple of 16"
        return None

    def prepare(self, exchange: Exchange) -> None:
        """Nothing: the library makes its metadata itself."""

    def _padded(self, tensor: torch.Tensor, num_tokens: int, fill: int = 0) -> torch.Tensor:
        """Tokens [T, ...] -> [N, ...], contiguous."""
        missing = num_tokens - tensor.shape[0]
        if missing:
            tensor = torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), fill)])
        return tensor.contiguous()

    def _require_bf16(self, rows: torch.Tensor) -> None:
        """Rows [any, h] must be bf16."""
        if rows.dtype != torch.bfloat16:
            raise ConfigError(
                f"{self.needed_by} with {rows.dtype} rows: the library moves bf16; add --bf16, or use "
                "--moe-flex-dispatcher-backend hybridep --moe-hybridep-engine auto."
            )


def _refuse_in_capture(what: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"deep_ep: {what} would end the capture; run a step of the same size before.")


@dataclasses.dataclass
class _Handle:
    """What HybridEPBuffer gave for an exchange."""

    num_tokens: int
    """N"""

    opaque: Any
    """The library's handle."""


class DeepEPHybridEngine(_DeepEPEngine):
    """Dispatch with permute and combine with unpermute of `HybridEPBuffer`."""

    library_class, needed_by = "HybridEPBuffer", "moe_hybridep_engine='deep_ep'"

    @classmethod
    def why_unavailable(cls, setup: EngineSetup) -> str | None:
        """As for both adapters; the metadata kernels also want four experts in the group."""
        experts = setup.num_local_experts * setup.num_ranks
        return super().why_unavailable(setup) or (f"{experts} experts: no multiple of 4" if experts % 4 else None)

    def reads_counts(self, is_static: bool) -> bool:
        """Exact sizes are waited for by the library, and by the group's agreement on N."""
        return not is_static

    def dispatch(
        self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden [T, h], probs [T, K] or None -> rows [P, h], row probs [P] or None."""
        self._require_bf16(hidden)
        padding = {"pad_multiple": self.setup.row_multiple if self.setup.row_multiple > 1 else None}
        if exchange.saved is None:
            return self._first_dispatch(exchange, hidden, probs, padding)
        saved: _Handle = exchange.saved
        rows = self._padded(hidden, saved.num_tokens)
        options = {"handle": saved.opaque, "num_permuted_tokens": exchange.num_rows, "non_blocking": exchange.is_static}
        return self._buffer.dispatch_with_permute(hidden=rows, **options, **padding)[0], None

    def _first_dispatch(
        self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None, padding: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        most = exchange.max_tokens
        if most is None:
            most = most_tokens(exchange.num_tokens, self.setup.group, hidden.device)
        num_tokens = round_up(max(most, 1), CHUNK_TOKENS)
        self._grow(num_tokens)
        routing_map, dense_probs = self._dense(exchange, probs, num_tokens)
        rows, row_probs, _, counts, handle = self._buffer.dispatch_with_permute(
            hidden=self._padded(hidden, num_tokens),
            routing_map=routing_map,
            probs=dense_probs,
            num_permuted_tokens=exchange.row_budget,
            non_blocking=exchange.is_static,
            **padding,
        )
        exchange.saved, exchange.num_rows = _Handle(num_tokens, handle), rows.shape[0]
        if exchange.is_static:
            exchange.dropped_rows = overflow_flag(handle).long()
            exchange.tokens_per_expert = kept_rows(counts, rows.shape[0])
        else:
            exchange.host_tokens_per_expert = counts.tolist()
            exchange.tokens_per_expert = counts.to(hidden.device, non_blocking=True)
        return rows, row_probs

    def _grow(self, num_tokens: int) -> None:
        """Build the buffer for N tokens; all ranks see the same N, so all of them build."""
        if num_tokens > self._capacity:
            _refuse_in_capture(f"growing the buffer to {num_tokens} tokens")
            setup = self.setup
            self._buffer = self._library.HybridEPBuffer(
                group=setup.group,
                hidden_dim=setup.hidden_size,
                max_num_of_tokens_per_rank=num_tokens,
                num_local_experts=setup.num_local_experts,
                num_sms_dispatch_api=setup.num_sms,
                num_sms_combine_api=setup.num_sms,
            )
            self._capacity = num_tokens

    def _dense(
        self, exchange: Exchange, probs: torch.Tensor | None, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots [T, K] -> map bool [N, W * n], probs fp32 [N, W * n]."""
        ids = self._padded(exchange.expert_ids, num_tokens, fill=-1).long()
        num_experts = self.setup.num_ranks * self.setup.num_local_experts
        columns = torch.where(ids < 0, num_experts, ids)
        routing_map = torch.zeros(num_tokens, num_experts + 1, dtype=torch.bool, device=ids.device)
        routing_map.scatter_(1, columns, True)
        if probs is None:
            return routing_map[:, :-1].contiguous(), None
        values = self._padded(probs.float(), num_tokens)
        dense = values.new_zeros(num_tokens, num_experts + 1).scatter_(1, columns, values)
        return routing_map[:, :-1].contiguous(), dense[:, :-1].contiguous()

    def combine(
        self, exchange: Exchange, rows: torch.Tensor, row_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [P, h], row probs [P] or None -> hidden [T, h], probs [T, K] or None."""
        self._require_bf16(rows)
        saved: _Handle = exchange.saved
        hidden, probs = self._buffer.combine_with_unpermute(
            hidden=rows.contiguous(),
            probs=None if row_probs is None else row_probs.float().contiguous(),
            handle=saved.opaque,
            pad_multiple=self.setup.row_multiple if self.setup.row_multiple > 1 else None,
        )
        num_tokens, ids = exchange.num_tokens, exchange.expert_ids
        if row_probs is None:
            return hidden[:num_tokens], None
        slot_probs = probs[:num_tokens].gather(1, ids.clamp(min=0).long()).masked_fill(ids < 0, 0)
        return hidden[:num_tokens], slot_probs


def overflow_flag(handle: Any) -> torch.Tensor:
    """The overflow flag int32 [1] of a handle made without blocking.

    Raises: ConfigError if the handle is not of the length that was verified: a wrong field would be worse than none.
    """
    flag = handle[-1] if isinstance(handle, tuple) and len(handle) == HANDLE_LENGTH else None
    if not (isinstance(flag, torch.Tensor) and flag.dtype == torch.int32 and flag.numel() == 1):
        raise ConfigError(
            "moe_hybridep_engine='deep_ep' with a row budget: this version's handle does not tell where its overflow "
            "flag is; drop --moe-expert-rank-capacity-factor or use --moe-hybridep-engine auto."
        )
    return flag.view(1)


def kept_rows(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Cut the rows of experts int64 [n] off at the budget: the last ones lose theirs."""
    ends = counts.cumsum(0)
    return ends.clamp(max=num_rows) - (ends - counts).clamp(max=num_rows)


@dataclasses.dataclass
class _Arrival:
    """What `Buffer` gave for an exchange."""

    opaque: Any
    """The library's handle."""

    layout: RowLayout
    """Rows of the copies that arrived, by expert."""


class DeepEPBufferEngine(_DeepEPEngine):
    """Dispatch and combine of `Buffer`, one copy per rank, with our expansion."""

    has_static_sizes = False
    library_class, needed_by = "Buffer", "moe_flex_dispatcher_backend='deepep'"

    def reads_counts(self, is_static: bool) -> bool:
        """The library waits for the counts itself, also where they are known."""
        return True

    def _build(self, hidden_bytes: int) -> Any:
        """The buffer, with the sizes that the library recommends for rows of so many bytes."""
        if self._buffer is None:
            _refuse_in_capture("building the buffer")
            buffer, ranks = self._library.Buffer, self.setup.num_ranks
            if self.setup.num_sms is not None:
                buffer.set_num_sms(self.setup.num_sms)
            configs = (buffer.get_dispatch_config(ranks), buffer.get_combine_config(ranks))
            nvlink = max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs)
            rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, ranks) for config in configs)
            self._buffer = buffer(group=self.setup.group, num_nvl_bytes=nvlink, num_rdma_bytes=rdma)
        return self._buffer

    def dispatch(
        self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden [T, h], probs [T, K] or None -> rows [P, h], row probs [P] or None."""
        self._require_bf16(hidden)
        buffer, rows = self._build(hidden.shape[1] * hidden.element_size()), hidden.contiguous()
        if exchange.saved is not None:
            saved: _Arrival = exchange.saved
            copies = buffer.dispatch(rows, handle=saved.opaque)[0]
            return gather_rows(copies, None, saved.layout.pairs, saved.layout.slots_per_token)
        ids, setup = exchange.expert_ids.long(), self.setup
        weights = torch.ones_like(ids, dtype=torch.float32) if probs is None else probs.float().contiguous()
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            ids, setup.num_ranks * setup.num_local_experts
        )
        copies, arrived_ids, arrived_probs, counts, handle, _ = buffer.dispatch(
            rows,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
        )
        padded = [round_up(count, setup.row_multiple) for count in counts]
        layout = row_layout(arrived_ids.int(), setup.num_local_experts, sum(padded), setup.row_multiple)
        exchange.saved, exchange.num_rows = _Arrival(handle, layout), sum(padded)
        exchange.host_tokens_per_expert, exchange.tokens_per_expert = padded, layout.tokens_per_expert
        return gather_rows(copies, None if probs is None else arrived_probs, layout.pairs, layout.slots_per_token)

    def combine(
        self, exchange: Exchange, rows: torch.Tensor, row_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [P, h], row probs [P] or None -> hidden [T, h], probs [T, K] or None."""
        self._require_bf16(rows)
        saved: _Arrival = exchange.saved
        copies, probs = sum_rows(rows, row_probs, saved.layout.slots, rows.dtype)
        hidden, combined, _ = self._buffer.combine(copies, handle=saved.opaque, topk_weights=probs)
        return hidden, None if row_probs is None else combined.masked_fill(exchange.expert_ids < 0, 0)
