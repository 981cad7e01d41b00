"""Exchanges of the symm_mem engine between ranks in one process, compared with their definition bit for bit.

The cases run interpreted on a CPU at small shapes and natively on one GPU at large ones. A case is four operations:
dispatch and combine forward, then the backward of both along the saved routing.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron.core.fp8.wire import pack_rows, unpack_rows
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem import SymmMemEngine
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_group import LocalSymmetricGroup
from tests.common.exchange_definition import LocalExchange

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One exchange. Routings: random, one_rank (all to rank 0), skip_rank (none to rank 1), holes (ids of -1)."""

    tokens: tuple[int, ...]
    experts: int = 2
    """on each rank"""
    topk: int = 2
    width: int = 16
    dtype: str = "bf16"
    multiple: int = 1
    budget: int | None = None
    """rows of each rank; None: exact sizes"""
    routing: str = "random"
    is_strided: bool = False
    """hidden states and rows are views, gradients expanded"""
    is_packed: bool = False
    """rows travel as codes and scales"""
    seed: int = 0

    @property
    def name(self) -> str:
        """Test id."""
        parts = [f"T{'-'.join(map(str, self.tokens))}", f"n{self.experts}k{self.topk}h{self.width}", self.dtype]
        parts += [f"x{self.multiple}"] * (self.multiple > 1) + [f"budget{self.budget}"] * (self.budget is not None)
        return "_".join([*parts, self.routing, *["strided"] * self.is_strided, *["packed"] * self.is_packed])

    def generator(self, device: str) -> torch.Generator:
        """The same numbers for the same case."""
        return torch.Generator(device).manual_seed(self.seed)

    def expert_ids(self, device: str, generator: torch.Generator) -> list[torch.Tensor]:
        """int32 [T, K] of each rank, ascending, -1 behind."""
        num_experts = len(self.tokens) * self.experts
        allowed = torch.ones(num_experts, device=device)
        if self.routing == "one_rank":
            allowed[self.experts :] = 0
        elif self.routing == "skip_rank":
            allowed[self.experts : 2 * self.experts] = 0
        result = []
        for count in self.tokens:
            scores = torch.rand(count, num_experts, device=device, generator=generator) - 2 * (1 - allowed)
            ids = scores.topk(min(self.topk, num_experts), dim=1).indices
            is_none = allowed[ids] == 0
            if self.routing == "holes":
                is_none |= torch.rand(ids.shape, device=device, generator=generator) < 0.4
            ids = ids.masked_fill(is_none, num_experts).sort(dim=1).values
            result.append(ids.masked_fill(ids == num_experts, -1).int())
        return result

    def normal(self, rows: list[int], device: str, generator: torch.Generator) -> list[torch.Tensor]:
        """Random [rows, h] for each rank, contiguous or not."""
        dtype = DTYPES[self.dtype]
        if self.is_strided:
            wide = [torch.randn(count, 2, self.width, device=device, generator=generator) for count in rows]
            return [tensor.to(dtype)[:, 1] for tensor in wide]
        return [torch.randn(count, self.width, device=device, generator=generator).to(dtype) for count in rows]


class Ranks:
    """Engines of W ranks in this process."""

    def __init__(self, case: Case, device: str, **options: float) -> None:
        self.group = LocalSymmetricGroup(len(case.tokens), device)
        setups = [EngineSetup(rank, case.experts, case.width, case.multiple) for rank in self.group.ranks]
        self.engines = [SymmMemEngine(setup, **options) for setup in setups]

    def exchanges(self, case: Case, expert_ids: list[torch.Tensor]) -> list[Exchange]:
        """An exchange per rank, prepared."""
        most = max(case.tokens) if case.budget is not None else None
        exchanges = [Exchange(expert_ids=ids, max_tokens=most, row_budget=case.budget) for ids in expert_ids]
        for engine, exchange in zip(self.engines, exchanges, strict=True):
            engine.prepare(exchange)
        return exchanges

    def dispatch(self, exchanges, hidden, probs, is_packed=False):
        """[(rows, row probs)] of all ranks."""
        probs = probs or [None] * len(hidden)
        calls = zip(self.engines, exchanges, hidden, probs, strict=True)
        return self.group.run([engine.dispatch_phases(*rest, is_packed) for engine, *rest in calls])

    def combine(self, exchanges, rows, row_probs):
        """[(hidden, probs)] of all ranks."""
        row_probs = row_probs or [None] * len(rows)
        calls = zip(self.engines, exchanges, rows, row_probs, strict=True)
        return self.group.run([engine.combine_phases(*rest) for engine, *rest in calls])


def run_case(case: Case, device: str, ranks: Ranks | None = None) -> list[str]:
    """Carry out the four operations; returns what differs from the definition, in words."""
    ranks = ranks or Ranks(case, device)
    with fresh_memory_of_nan():
        return _run_case(case, device, ranks)


@contextmanager
def fresh_memory_of_nan():
    """What nobody has written is NaN."""
    was_on = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on[0], warn_only=was_on[1])


def _run_case(case: Case, device: str, ranks: Ranks) -> list[str]:
    generator = case.generator(device)
    ids = case.expert_ids(device, generator)
    hidden, grads = (case.normal(list(case.tokens), device, generator) for _ in range(2))
    if case.is_strided:
        grads = [one[:, :1].expand(-1, case.width) for one in grads]
    probs = [torch.rand(x.shape, device=device, generator=generator) for x in ids]
    reference = LocalExchange(ids, case.experts, case.multiple, case.budget)
    exchanges = ranks.exchanges(case, ids)
    arriving = [unpack_rows(pack_rows(one), case.width) for one in hidden] if case.is_packed else hidden
    wanted = reference.dispatch(arriving, probs)
    found = _differences("dispatch", ranks.dispatch(exchanges, hidden, probs, case.is_packed), wanted, reference)
    for rank, exchange in enumerate(exchanges):
        counts = exchange.tokens_per_expert.tolist()
        dropped = 0 if exchange.dropped_rows is None else exchange.dropped_rows.item()
        if (counts, dropped) != (reference.tokens_per_expert[rank], reference.dropped_rows[rank]):
            found.append(f"rank {rank}: counts {counts}, dropped {dropped}")
        if exchange.host_tokens_per_expert not in (None, counts):
            found.append(f"rank {rank}: host counts {exchange.host_tokens_per_expert}")
    rows = case.normal(reference.num_rows, device, generator)
    row_grads = [torch.randn(len(x), device=device, generator=generator) for x in rows]
    for poisoned, value in zip(reference.unused_rows(), zip(rows, row_grads, strict=True), strict=True):
        for tensor in value:
            tensor[poisoned] = torch.nan
    without = [(hidden, None) for hidden, _ in reference.combine(rows, row_grads)]
    found += _differences("combine", ranks.combine(exchanges, rows, None), without)
    found += _differences(
        "backward of dispatch", ranks.combine(exchanges, rows, row_grads), reference.combine(rows, row_grads)
    )
    wanted = [(rows, None) for rows, _ in reference.dispatch(grads, probs)]
    return found + _differences("backward of combine", ranks.dispatch(exchanges, grads, None), wanted, reference)


def _differences(operation: str, got: list, wanted: list, reference: LocalExchange | None = None) -> list[str]:
    """Compare bit by bit; with a reference only the rows up to the end of the last expert's."""
    found = []
    for rank, pair in enumerate(zip(got, wanted, strict=True)):
        for what, mine, theirs in zip(("rows", "probs"), *pair, strict=True):
            if theirs is None:
                found += [] if mine is None else [f"{operation}, rank {rank}: unexpected {what}"]
                continue
            end = len(theirs) if reference is None else sum(reference.tokens_per_expert[rank])
            same = (mine[:end] == theirs[:end]).flatten(1 if mine.ndim > 1 else 0)
            same = same.all(dim=1) if same.ndim > 1 else same
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype or not same.all():
                bad = (~same).nonzero().flatten()
                found.append(
                    f"{operation}, rank {rank}, {what} {tuple(mine.shape)} {mine.dtype} for {tuple(theirs.shape)} "
                    f"{theirs.dtype}: {len(bad)} of {end} rows differ, first {bad[:5].tolist()}, got "
                    f"{mine[bad[:1]].flatten()[:4].tolist()}, wanted {theirs[bad[:1]].flatten()[:4].tolist()}"
                )
    return found


def run_staggered(case: Case, num_rounds: int, order_seed: int, ranks: Ranks | None = None) -> list[str]:
    """Rounds of dispatch and combine in which ranks run ahead as far as messages allow, which is by one; CPU only.

    `order_seed` says which rank sends its next message before others have taken in the last one.
    """
    ranks = ranks or Ranks(case, "cpu")
    size, generator = len(case.tokens), case.generator("cpu")
    rounds, found = [], []
    for _ in range(num_rounds):
        ids, hidden = case.expert_ids("cpu", generator), case.normal(list(case.tokens), "cpu", generator)
        probs = [torch.rand(x.shape, generator=generator) for x in ids]
        reference = LocalExchange(ids, case.experts, case.multiple, case.budget)
        sent = reference.dispatch(hidden, probs)
        rounds.append((ids, hidden, probs, reference, sent, reference.combine(*map(list, zip(*sent, strict=True)))))

    def program(rank: int):
        for ids, hidden, probs, reference, sent, returned in rounds:
            exchange = Exchange(expert_ids=ids[rank], max_tokens=max(case.tokens), row_budget=case.budget)
            ranks.engines[rank].prepare(exchange)
            got = yield from ranks.engines[rank].dispatch_phases(exchange, hidden[rank], probs[rank])
            end = sum(reference.tokens_per_expert[rank])
            found.extend(
                f"rank {rank}: rows" for a, b in zip(got, sent[rank], strict=True) if (a[:end] != b[:end]).any()
            )
            got = yield from ranks.engines[rank].combine_phases(exchange, *sent[rank])
            found.extend(f"rank {rank}: sums" for a, b in zip(got, returned[rank], strict=True) if (a != b).any())

    programs = [program(rank) for rank in range(size)]
    order = torch.Generator().manual_seed(order_seed)
    for _ in range(2 * num_rounds + 1):  # a step takes in the last message and sends the next one
        for rank in torch.randperm(size, generator=order).tolist():
            next(programs[rank], None)
    return found


SMALL = Case(tokens=(5, 3), experts=3)
INTERPRETED_CASES = [
    SMALL,
    replace(SMALL, tokens=(0, 3), topk=1, experts=1, dtype="fp32", width=24),
    replace(SMALL, tokens=(2, 1, 0, 2), experts=1, topk=3, dtype="fp16"),
    replace(SMALL, routing="one_rank", budget=14, multiple=4),
    replace(SMALL, tokens=(2, 1, 0, 1), experts=1, width=136, is_packed=True),
    replace(SMALL, tokens=(3, 2), width=256, budget=8, multiple=2, is_packed=True),
]
MORE_INTERPRETED_CASES = [
    replace(SMALL, multiple=4, dtype="fp32", width=24),
    replace(SMALL, tokens=(0, 0), experts=1),
    replace(SMALL, tokens=(2, 5, 3, 1), routing="skip_rank", is_strided=True),
    replace(SMALL, routing="one_rank", multiple=2),
    replace(SMALL, routing="holes"),
    replace(SMALL, budget=40, multiple=4),
    replace(SMALL, tokens=(4,), experts=5),
    replace(SMALL, tokens=(3, 1, 2, 2, 0, 1, 1, 2), experts=2, topk=4),
    replace(SMALL, width=24, dtype="fp32", is_packed=True),
    replace(SMALL, width=128, dtype="fp16", budget=6, is_strided=True, is_packed=True),
    replace(SMALL, tokens=(2, 0, 1, 3), routing="holes", width=2056, is_packed=True),
]


def large(**changes) -> Case:
    """A case for a GPU."""
    return replace(Case(tokens=(64, 65), experts=4, topk=2, width=128), **changes)


NATIVE_CASES = [
    large(),
    large(tokens=(0, 1), experts=1, topk=1),
    large(tokens=(1, 3, 63, 0), experts=2, topk=3),
    large(tokens=(63, 64, 65, 0, 1, 3, 4095, 16), experts=8, topk=8, width=512, multiple=16),
    large(tokens=(4095, 16384), experts=64, topk=8, width=2048),
    large(tokens=(16384, 3), experts=16, topk=7, width=128),
    large(tokens=(4096, 4096), experts=4, topk=2, width=4096, multiple=128),
    large(tokens=(4096, 4095), experts=128, topk=8, width=7168, dtype="bf16"),
    large(tokens=(4096,) * 8, experts=32, topk=8, width=7168),
    large(tokens=(700, 900, 1100, 1300), experts=16, topk=6, width=1536, dtype="fp16", is_strided=True),
    large(tokens=(700, 900), experts=3, topk=5, width=136, dtype="fp32", multiple=32),
    large(tokens=(2000, 1999), routing="one_rank", experts=5, topk=4, width=256, multiple=8),
    large(tokens=(300, 301, 302, 303), routing="skip_rank", experts=5, topk=4, width=256),
    large(tokens=(1000, 1), routing="holes", experts=8, topk=8, width=384),
    large(tokens=(1000, 1000), budget=1500, experts=8, topk=2, width=384, multiple=16),
    large(tokens=(1000, 900), budget=6000, experts=8, topk=2, width=384, multiple=16),
    large(tokens=(64, 64), experts=32, topk=64, width=128),
]
NATIVE_PACKED_CASES = [
    large(tokens=(1, 3, 63, 0), experts=2, topk=3, width=8, is_packed=True),
    large(tokens=(700, 900), experts=3, topk=5, width=136, dtype="fp32", multiple=32, is_packed=True),
    large(tokens=(700, 900, 0, 1300), experts=16, topk=6, width=1536, dtype="fp16", is_strided=True, is_packed=True),
    large(tokens=(4096, 4095), experts=128, topk=8, width=7168, multiple=128, is_packed=True),
    large(tokens=(1000, 1000), budget=1500, experts=8, topk=2, width=384, multiple=16, is_packed=True),
]
