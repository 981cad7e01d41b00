"""What an engine of the hybridep dispatcher must return, by loops in one process: every row, every bit.

    case = DispatchCase(tokens=(3, 0, 65, 64), num_local_experts=2, num_slots=2)
    expected = expected_ranks(case)                       # one Expected per rank
    got = run_engine(engine, case, rank)                  # the same, from an engine: dispatch, combine, both duals

The rules are those of the engine's contract: rows by expert, source rank, token; padding rows are zeros; a token's rows
on one rank are added up in fp32 in the order of experts and rounded, then the ranks' sums in the order of ranks.
"""

import dataclasses

import torch

from megatron.core.transformer.moe.dispatchers.hybridep.engine import HybridEPEngine
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange, round_up


@dataclasses.dataclass(frozen=True)
class DispatchCase:
    """Sizes and contents of one exchange. `plan` says which experts tokens like: random, rank0 (all to rank 0's)."""

    tokens: tuple[int, ...]
    num_local_experts: int = 2
    num_slots: int = 2
    width: int = 8
    multiple: int = 1
    budget: int | None = None
    dtype: torch.dtype = torch.float32
    plan: str = "random"
    seed: int = 0
    is_strided: bool = False

    @property
    def num_ranks(self) -> int:
        """W"""
        return len(self.tokens)

    def __str__(self) -> str:
        """Test id: what differs from the defaults."""
        changed = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        known = {f.name: f.default for f in dataclasses.fields(self)}
        return "-".join(f"{name}={value}" for name, value in changed if value != known[name]).replace(" ", "")


@dataclasses.dataclass
class Inputs:
    """What a rank brings."""

    ids: torch.Tensor
    """int32 [T, K]"""
    hidden: torch.Tensor
    """[T, h]"""
    probs: torch.Tensor
    """[T, K]"""
    grad: torch.Tensor
    """[T, h], gradient of what combine returns."""


@dataclasses.dataclass
class Answers:
    """What a rank gets; rows behind the last expert's are cut off."""

    rows: torch.Tensor
    row_probs: torch.Tensor
    tokens_per_expert: list[int]
    dropped: int
    hidden: torch.Tensor
    """combine(expert_output(rows, row_probs))"""
    grad_rows: torch.Tensor
    """dispatch(grad)"""
    grad_hidden: torch.Tensor
    """combine(expert_output(grad_rows, row_probs), row_probs), both results"""
    grad_probs: torch.Tensor


def expert_output(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Something that depends on the row: rows [P, h], factors [P] -> [P, h]."""
    return (rows * (1 + factors.to(rows.dtype)).unsqueeze(1)).to(rows.dtype)


def make_inputs(case: DispatchCase, rank: int) -> Inputs:
    """Random inputs of a rank, the same wherever they are made; a tenth of the slots is empty."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    num_tokens, num_experts = case.tokens[rank], case.num_ranks * case.num_local_experts
    likes = torch.rand(num_tokens, num_experts, generator=generator)
    if case.plan == "rank0":
        likes[:, : case.num_local_experts] += 1
    chosen = likes.argsort(dim=1, descending=True)[:, : case.num_slots].sort(dim=1).values
    chosen[torch.rand(chosen.shape, generator=generator) < 0.1] = num_experts
    chosen = chosen.sort(dim=1).values
    ids = chosen.masked_fill(chosen == num_experts, -1).int()
    hidden = torch.randn(num_tokens, case.width, generator=generator, dtype=torch.float64).to(case.dtype)
    wide = torch.promote_types(case.dtype, torch.float32)
    probs = torch.rand(num_tokens, case.num_slots, generator=generator, dtype=torch.float64).to(wide)
    grad = torch.randn(num_tokens, case.width, generator=generator, dtype=torch.float64).to(case.dtype)
    if case.is_strided:
        hidden = hidden.t().contiguous().t()
        grad = grad[:, :1].expand(-1, case.width)
    return Inputs(ids, hidden, probs, grad)


def expected_ranks(case: DispatchCase) -> list[Answers]:
    """The answers of all ranks."""
    inputs = [make_inputs(case, rank) for rank in range(case.num_ranks)]
    layouts = [_layout(case, inputs, rank) for rank in range(case.num_ranks)]
    answers = []
    for places, counts, dropped in layouts:
        rows = _rows(places, [one.hidden for one in inputs])
        row_probs = (
            torch.stack([inputs[p[0]].probs[p[1], p[2]] if p else inputs[0].probs.new_zeros(()) for p in places])
            if places
            else inputs[0].probs.new_zeros(0)
        )
        grad_rows = _rows(places, [one.grad for one in inputs])
        empty = torch.zeros(0)
        answers.append(Answers(rows, row_probs, counts, dropped, empty, grad_rows, empty, empty))
    outputs = [expert_output(one.rows, one.row_probs) for one in answers]
    gradients = [expert_output(one.grad_rows, one.row_probs) for one in answers]
    for rank, one in enumerate(answers):
        one.hidden = _combined(case, layouts, outputs, inputs[rank], rank)
        one.grad_hidden = _combined(case, layouts, gradients, inputs[rank], rank)
        one.grad_probs = torch.zeros_like(inputs[rank].probs)
        for source, (places, _, _) in enumerate(layouts):
            for row, place in enumerate(places):
                if place and place[0] == rank:
                    one.grad_probs[place[1], place[2]] = answers[source].row_probs[row]
    return answers


def _layout(case: DispatchCase, inputs: list[Inputs], rank: int):
    """([(source, token, slot) or None for padding], rows of each expert, dropped rows) of a rank."""
    places, counts, dropped = [], [], 0
    limit = 1 << 60 if case.budget is None else case.budget
    next_row = 0
    for expert in range(rank * case.num_local_experts, (rank + 1) * case.num_local_experts):
        first = next_row
        for source, one in enumerate(inputs):
            for token, slot in (one.ids == expert).nonzero().tolist():
                if next_row < limit:
                    places.append((source, token, slot))
                else:
                    dropped += 1
                next_row += 1
        while next_row % case.multiple:
            if next_row < limit:
                places.append(None)
            next_row += 1
        counts.append(min(next_row, limit) - min(first, limit))
    return places, counts, dropped


def _rows(places, sources: list[torch.Tensor]) -> torch.Tensor:
    zeros = torch.zeros_like(sources[0][:1]) if len(sources[0]) else sources[0].new_zeros(1, sources[0].shape[1])
    rows = [sources[p[0]][p[1]] if p else zeros[0] for p in places]
    return torch.stack(rows) if rows else sources[0].new_zeros(0, sources[0].shape[1])


def _combined(case: DispatchCase, layouts, outputs: list[torch.Tensor], inputs: Inputs, rank: int) -> torch.Tensor:
    """Sum per rank in the order of experts, round, sum over ranks: [T, h]."""
    wide = torch.promote_types(case.dtype, torch.float32)
    total = inputs.hidden.new_zeros(len(inputs.ids), case.width, dtype=wide)
    for (places, _, _), output in zip(layouts, outputs, strict=True):
        partial = torch.zeros_like(total)
        for row, place in enumerate(places):
            if place and place[0] == rank:
                partial[place[1]] += output[row].to(wide)
        total += partial.to(case.dtype).to(wide)
    return total.to(case.dtype)


def new_exchange(case: DispatchCase, inputs: Inputs) -> Exchange:
    """The exchange of a rank, on the device of the inputs."""
    most = None if case.budget is None else max(case.tokens)
    return Exchange(expert_ids=inputs.ids, max_tokens=most, row_budget=case.budget)


def run_engine(engine: HybridEPEngine, case: DispatchCase, rank: int, device: str = "cpu") -> Answers:
    """Dispatch, combine and both duals by an engine; rows that may not be read are NaN."""
    made = make_inputs(case, rank)
    inputs = Inputs(*(getattr(made, f.name).to(device) for f in dataclasses.fields(Inputs)))
    exchange = new_exchange(case, inputs)
    engine.prepare(exchange)
    rows, row_probs = engine.dispatch(exchange, inputs.hidden, inputs.probs)
    assert row_probs is not None, "probabilities were sent"
    used = int(exchange.tokens_per_expert.sum())
    outputs = _poisoned(expert_output(rows, row_probs), exchange, case)
    hidden, nothing = engine.combine(exchange, outputs, None)
    assert nothing is None, "no probabilities were sent"
    grad_rows, nothing = engine.dispatch(exchange, inputs.grad, None)
    assert nothing is None, "no probabilities were sent"
    gradients = _poisoned(expert_output(grad_rows, row_probs), exchange, case)
    grad_hidden, grad_probs = engine.combine(exchange, gradients, _poisoned(row_probs, exchange, case))
    counts = exchange.tokens_per_expert.tolist()
    assert exchange.host_tokens_per_expert in (None, counts), f"host {exchange.host_tokens_per_expert}, device {counts}"
    dropped = 0 if exchange.dropped_rows is None else int(exchange.dropped_rows)
    found = (rows[:used], row_probs[:used], counts, dropped, hidden, grad_rows[:used], grad_hidden, grad_probs)
    return Answers(*(value.cpu() if isinstance(value, torch.Tensor) else value for value in found))


def _poisoned(rows: torch.Tensor, exchange: Exchange, case: DispatchCase) -> torch.Tensor:
    """Fill what combine may not read with NaN: rows [P, ...], padding and tail."""
    rows = rows.clone()
    rows[int(exchange.tokens_per_expert.sum()) :] = float("nan")
    return rows


def assert_same(got: Answers, expected: Answers, where: str) -> None:
    """Equal bit for bit."""
    for field in dataclasses.fields(Answers):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        is_same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert is_same, f"{where}: {field.name}\n{a}\nexpected\n{b}"


def lossless_budget(case: DispatchCase) -> int:
    """Rows that suffice on every rank."""
    most = max(case.tokens) * case.num_ranks * min(case.num_slots, case.num_local_experts)
    return round_up(most + case.num_local_experts * (case.multiple - 1), case.multiple)
