"""The engine of one host: kernels write rows straight into the memory of the GPUs that need them.

    dispatch     source       push ------.                     each token once per destination, with its slots
                                          \\ NVLink
                 experts      push  wait   `-> arrange  expand  wait for all peers, lay out the rows, fill them
    combine      experts      reduce -----.                    one sum per token and source
                                          \\ NVLink
                 source       reduce  wait `-> add              wait for all peers, add their sums up

Each line is a row of kernels on one stream, the current one. Counts travel with the rows and stay on the device; under
a row budget the host waits for nothing, and the kernels can be captured and replayed with another routing. Without a
budget the host reads the counts once, between arrange and expand, when the rows are on their way already.

A rank whose tokens do not fit its section (only without a budget, where nobody knew) sends the header alone; all ranks
read the same counts, make the sections larger together and send again.

Legend: T tokens of this rank, K slots of a token, h width, W ranks, n experts on each, P rows at this rank's experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import env, streams
from megatron.core.errors import ConfigError
from megatron.core.fusions.triton_casts import is_interpreted
from megatron.core.optional_deps import is_available
from megatron.core.transformer.moe.dispatchers.host_counts import HostCounts
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup, HybridEPEngine
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_buffers import Capacity, Mailbox
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_group import (
    Phases,
    SymmetricGroup,
    finish,
    open_symmetric_group,
)
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_kernels import (
    add_kernel,
    expand_kernel,
    push_kernel,
    reduce_kernel,
    zero_kernel,
)
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_launch import Launch, Tiling, next_power_of_2
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_routing import arrange_kernel, number_rows
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_signals import COMBINE, DISPATCH

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROW_ALIGNMENT = 8
"""Elements: 16-byte accesses in half precision."""
MAX_UNROLLED_SLOTS = 8
PACKED_BLOCK = 128
"""Elements that share a scale on the wire; a kernel holds whole blocks."""

Rows = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class Routing:
    """What an exchange keeps on the device, made by `prepare`; the slots of an exact one by dispatch."""

    counts: torch.Tensor
    """int32 [W * n], rows of this rank for each expert."""

    places: torch.Tensor
    """int32 [T, K], which of these rows each slot is."""

    firsts: torch.Tensor
    """int32 [W, n], first row of each source in each of our experts."""

    group_ends: torch.Tensor
    """int32 [2, n], end of each expert's rows without and with padding."""

    tokens_per_expert: torch.Tensor
    """int64 [n], rows of each of our experts, padding included, as far as the budget goes."""

    totals: torch.Tensor
    """int64 [3], all rows without a budget, dropped rows, tokens of the rank that has most."""

    dropped_rows: torch.Tensor
    """int64 [1], of `totals`."""

    slot_rows: torch.Tensor
    """int32 [W, N, K], row at our experts of every slot of every source; N is 0 until an exact exchange knows it."""

    is_known: bool = False
    """The first dispatch has filled in all of this."""


class SymmMemEngine(HybridEPEngine):
    """Moves rows by kernels over symmetric memory. `*_phases` are the operations for ranks that share a process."""

    packs_rows = True

    def __init__(self, setup: EngineSetup, timeout_s: float | None = None, launch: Launch | None = None) -> None:
        super().__init__(setup)
        group = open_symmetric_group(setup.group)
        self._mail = Mailbox(group, setup.num_local_experts)
        self._timeout_s = group.timeout_s if timeout_s is None else timeout_s
        self._launch = launch or Launch.of(setup.num_sms, setup.hidden_size)

    @classmethod
    def why_unavailable(cls, setup: EngineSetup) -> str | None:
        """A GPU, Triton, one host, rows of whole 16-byte words."""
        if setup.hidden_size % ROW_ALIGNMENT:
            return f"hidden_size={setup.hidden_size}: rows must be a multiple of {ROW_ALIGNMENT} elements"
        if not is_available("triton"):
            return "Triton is not installed"
        if isinstance(setup.group, SymmetricGroup) or (is_interpreted() and setup.num_ranks == 1):
            return None
        if not torch.cuda.is_available():
            return "there is no GPU"
        return _why_not_connected(setup.group)

    def reads_counts(self, is_static: bool) -> bool:
        return not is_static

    def raise_if_dead(self) -> None:
        """Raise RankFailure that names the peers a kernel waited for in vain. Host: no synchronisation."""
        self._mail.signals.raise_if_dead()

    def prepare(self, exchange: Exchange) -> None:
        ids, ranks, experts = exchange.expert_ids, self.setup.num_ranks, self.setup.num_local_experts
        counts, places = number_rows(ids, ranks * experts)
        totals = torch.empty(3, dtype=torch.int64, device=ids.device)
        exchange.saved = Routing(
            counts=counts,
            places=places,
            firsts=ids.new_empty(ranks, experts),
            group_ends=ids.new_empty(2, experts),
            tokens_per_expert=torch.empty(experts, dtype=torch.int64, device=ids.device),
            totals=totals,
            dropped_rows=totals[1:2],
            slot_rows=ids.new_empty(ranks, (exchange.max_tokens or 0) if exchange.is_static else 0, ids.shape[1]),
        )

    def dispatch(self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None) -> Rows:
        """Hidden [T, h], probs [T, K] -> rows [P, h], row probs [P]."""
        return finish(self.dispatch_phases(exchange, hidden, probs))

    def combine(self, exchange: Exchange, rows: torch.Tensor, row_probs: torch.Tensor | None) -> Rows:
        """Rows [P, h], row probs [P] -> hidden [T, h], probs [T, K]."""
        return finish(self.combine_phases(exchange, rows, row_probs))

    def dispatch_packed(self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None) -> Rows:
        """Hidden [T, h], probs [T, K] -> rows [P, h], row probs [P]; the kernels pack and unpack in passing."""
        return finish(self.dispatch_phases(exchange, hidden, probs, is_packed=True))

    def dispatch_phases(
        self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None, is_packed: bool = False
    ) -> Phases[Rows]:
        """Dispatch hidden [T, h], probs [T, K]; yields while the messages are under way."""
        routing: Routing = exchange.saved
        hidden = hidden.contiguous()
        self._check(exchange, hidden, probs)
        self._reserve(exchange, hidden, exchange.max_tokens or 0)
        self.push(exchange, hidden, None if routing.is_known else probs, is_packed)
        yield
        self._wait(DISPATCH, self._launch.push.blocks)
        if routing.is_known:
            return self.expand(exchange, hidden, None, is_packed), None
        self.arrange(exchange)
        if not exchange.is_static:
            most_tokens = self._read_counts(exchange)
            if most_tokens > self._mail.capacity.tokens:
                self._reserve(exchange, hidden, most_tokens)
                self.push(exchange, hidden, probs, is_packed)
                yield
                self._wait(DISPATCH, self._launch.push.blocks)
            routing.slot_rows = routing.slot_rows.new_empty(self.setup.num_ranks, most_tokens, routing.places.shape[1])
        row_probs = torch.empty(exchange.num_rows or 0, dtype=torch.float32, device=hidden.device)
        rows = self.expand(exchange, hidden, row_probs, is_packed)
        routing.is_known = True
        return rows, row_probs

    def combine_phases(self, exchange: Exchange, rows: torch.Tensor, row_probs: torch.Tensor | None) -> Phases[Rows]:
        """Combine rows [P, h], row probs [P]; yields while the messages are under way."""
        rows = rows.contiguous()
        self._check(exchange, rows, row_probs)
        self._reserve(exchange, rows, 0)
        self.reduce(exchange, rows, row_probs)
        yield
        self._wait(COMBINE, self._launch.reduce.blocks)
        hidden = rows.new_empty(exchange.num_tokens, self.setup.hidden_size)
        probs = None
        if row_probs is not None:
            probs = torch.empty(exchange.expert_ids.shape, dtype=torch.float32, device=rows.device)
        self.add(exchange, hidden, probs)
        return hidden, probs

    # ------------------------------------------------------------------------------------------------ the messages

    def _check(self, exchange: Exchange, rows: torch.Tensor, probs: torch.Tensor | None) -> None:
        self.raise_if_dead()
        if rows.dtype not in DTYPES or (probs is not None and probs.dtype != torch.float32):
            kinds = f"rows of {rows.dtype}" + (f" with probabilities of {probs.dtype}" if probs is not None else "")
            raise ConfigError(
                f"{kinds}: symmetric memory moves rows of bfloat16, float16 or float32 with float32 probabilities; "
                "choose another --moe-hybridep-engine for this dtype."
            )
        limit = exchange.max_tokens
        assert limit is not None or not exchange.is_static, "a static exchange needs the agreed number of tokens"
        assert limit is None or exchange.num_tokens <= limit, f"{exchange.num_tokens} tokens, {limit} were agreed on"

    def _reserve(self, exchange: Exchange, rows: torch.Tensor, num_tokens: int) -> None:
        row_bytes = self.setup.hidden_size * rows.element_size()
        self._mail.reserve(Capacity(num_tokens, exchange.expert_ids.shape[1], row_bytes))

    def push(
        self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None, is_packed: bool = False
    ) -> None:
        """Send hidden [T, h]; with probs [T, K] the slots and the header too."""
        mail, setup, routing, tiling = self._mail, self.setup, exchange.saved, self._launch.push
        num_tokens = exchange.num_tokens
        slots = exchange.expert_ids.shape[1]
        weights = None if probs is None else probs.contiguous()
        reads = (hidden, exchange.expert_ids, routing.places, weights, routing.counts, mail.signals.epoch)
        streams.declare("push", reads, mail.tensors[:2])
        push_kernel[(tiling.blocks,)](
            hidden,
            exchange.expert_ids,
            routing.places,
            hidden if weights is None else weights,
            routing.counts,
            num_tokens if num_tokens <= mail.capacity.tokens else 0,
            num_tokens,
            control=mail.control_addresses,
            places_at=mail.sections.places_at,
            HEADERS_AT=mail.headers_at,
            OPERATION=DISPATCH,
            EXPERTS_PAD=next_power_of_2(setup.num_local_experts),
            TILE=tiling.tokens,
            WITH_ROUTING=probs is not None,
            PACKED=is_packed,
            EXPERTS=setup.num_local_experts,
            **self._common(slots, tiling, is_packed),
        )

    def _wait(self, operation: int, num_reports: int) -> None:
        self._mail.signals.wait(self._mail.control, operation, num_reports, self._timeout_s)

    def arrange(self, exchange: Exchange) -> None:
        """Lay out the rows from the headers of all ranks."""
        mail, setup, routing = self._mail, self.setup, exchange.saved
        made = (routing.firsts, routing.group_ends, routing.tokens_per_expert, routing.totals)
        streams.declare("arrange", mail.tensors, made)
        arrange_kernel[(1,)](
            mail.control[mail.headers_at :],
            mail.signals.epoch,
            routing.firsts,
            routing.group_ends,
            routing.tokens_per_expert,
            routing.totals,
            2**31 - 1 if exchange.row_budget is None else exchange.row_budget,
            MULTIPLE=setup.row_multiple,
            SIZE=setup.num_ranks,
            SIZE_PAD=next_power_of_2(setup.num_ranks),
            EXPERTS=setup.num_local_experts,
            EXPERTS_PAD=next_power_of_2(setup.num_local_experts),
        )
        exchange.num_rows, exchange.tokens_per_expert = exchange.row_budget, routing.tokens_per_expert
        exchange.dropped_rows = routing.dropped_rows if exchange.is_static else None

    def _read_counts(self, exchange: Exchange) -> int:
        """Bring the counts to the host; returns the tokens of the rank with most. Host: one wait."""
        values = torch.cat([exchange.saved.totals, exchange.saved.tokens_per_expert])
        exchange.num_rows, _, most_tokens, *exchange.host_tokens_per_expert = HostCounts(values).wait()
        return most_tokens

    def expand(
        self, exchange: Exchange, hidden: torch.Tensor, row_probs: torch.Tensor | None, is_packed: bool = False
    ) -> torch.Tensor:
        """Fill the rows [P, h]; row probs [P] are there to be filled in an exchange's first dispatch."""
        mail, setup, routing, tiling = self._mail, self.setup, exchange.saved, self._launch.expand
        rows = hidden.new_empty(exchange.num_rows or 0, setup.hidden_size)
        made = (rows, row_probs, routing.slot_rows)
        streams.declare("expand", (hidden, routing.firsts, routing.slot_rows, *mail.tensors), made)
        expand_kernel[(tiling.blocks,)](
            hidden,
            rows,
            rows if row_probs is None else row_probs,
            routing.slot_rows,
            routing.firsts,
            mail.control[mail.headers_at :],
            routing.slot_rows.shape[1],
            rows.shape[0],
            places_at=mail.sections.places_at,
            WITH_ROUTING=row_probs is not None,
            PACKED=is_packed,
            EXPERTS=setup.num_local_experts,
            **self._common(routing.slot_rows.shape[2], tiling, is_packed),
        )
        if setup.row_multiple > 1:
            streams.declare("clear padding", (routing.group_ends,), (rows, row_probs))
            zero_kernel[(setup.num_local_experts,)](
                rows,
                rows if row_probs is None else row_probs,
                routing.group_ends,
                rows.shape[0],
                setup.num_local_experts,
                setup.hidden_size,
                tiling.width(setup.hidden_size),
                WITH_PROBS=row_probs is not None,
            )
        return rows

    def reduce(self, exchange: Exchange, rows: torch.Tensor, row_probs: torch.Tensor | None) -> None:
        """Send the sums of rows [P, h] and the values row_probs [P] home."""
        mail, routing, tiling = self._mail, exchange.saved, self._launch.reduce
        slots = routing.slot_rows.shape[2]
        values = None if row_probs is None else row_probs.contiguous()
        reads = (rows, values, routing.slot_rows, mail.signals.epoch)
        streams.declare("reduce", reads, mail.tensors[:2])
        reduce_kernel[(tiling.blocks,)](
            rows,
            rows if values is None else values,
            routing.slot_rows,
            routing.slot_rows.shape[1],
            control=mail.control_addresses,
            OPERATION=COMBINE,
            UNROLL=min(slots, MAX_UNROLLED_SLOTS),
            WITH_PROBS=row_probs is not None,
            **self._common(slots, tiling),
        )

    def add(self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None) -> None:
        """Fill hidden [T, h] and probs [T, K] from what the ranks returned."""
        tiling = self._launch.add
        streams.declare("add", (exchange.expert_ids, *self._mail.tensors), (hidden, probs))
        add_kernel[(tiling.blocks,)](
            hidden,
            hidden if probs is None else probs,
            exchange.expert_ids,
            exchange.num_tokens,
            WITH_PROBS=probs is not None,
            EXPERTS=self.setup.num_local_experts,
            **self._common(exchange.expert_ids.shape[1], tiling),
        )

    def _common(self, slots: int, tiling: Tiling, is_packed: bool = False) -> dict[str, Any]:
        """What push, expand, reduce and add all take: where messages lie, and sizes to compile for."""
        mail, width = self._mail, self.setup.hidden_size
        return {
            "data": mail.data_addresses,
            "epoch": mail.signals.epoch,
            "rank": self.setup.rank,
            "capacity": mail.capacity.tokens,
            "buffer_bytes": mail.sections.num_bytes,
            "probs_at": mail.sections.probs_at,
            "rows_at": mail.sections.rows_at,
            "SIZE": self.setup.num_ranks,
            "SLOTS": slots,
            "SLOTS_PAD": next_power_of_2(slots),
            "WIDTH": width,
            "BLOCK": max(tiling.width(width), PACKED_BLOCK if is_packed else 1),
            "INTERPRETED": is_interpreted(),
            "num_warps": tiling.num_warps(width),
        }


def _why_not_connected(group: dist.ProcessGroup | None) -> str | None:
    """Tell why the GPUs of a group's ranks cannot write to each other, as far as this rank can see."""
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    per_host = env.local_world_size()
    if per_host is None or len(ranks) < 2:
        return None
    if len({rank // per_host for rank in ranks}) > 1:
        return f"the expert ranks {ranks} are on several hosts with {per_host} processes each"
    here = torch.cuda.current_device()
    others = {rank % per_host for rank in ranks} - {here}
    # With one visible device per process the others cannot be asked; the rendezvous will tell.
    asked = [other for other in others if other < torch.cuda.device_count()]
    unreachable = [other for other in asked if not torch.cuda.can_device_access_peer(here, other)]
    return f"GPU {here} has no peer access to GPU {unreachable}" if unreachable else None
