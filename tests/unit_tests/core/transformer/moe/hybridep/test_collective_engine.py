"""The collective engine against loops, bit for bit: rows, sums, both gradients, with and without a row budget."""

import dataclasses
import gc
import time

import pytest
import torch
import torch.distributed as dist

from megatron.core.fusions.fused_permute import sum_rows
from megatron.core.transformer.moe.dispatchers.hybridep import collective
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup, shared_engine
from tests.common.dispatch_cases import (
    DispatchCase,
    assert_same,
    expected_ranks,
    lossless_budget,
    make_inputs,
    new_exchange,
    run_engine,
)
from tests.common.mutants import replaced

CASES = [
    DispatchCase((3, 5)),
    DispatchCase((0, 1), num_slots=1),
    DispatchCase((0, 0)),
    DispatchCase((63, 65), num_local_experts=1, dtype=torch.bfloat16),
    DispatchCase((64, 1), num_local_experts=8, num_slots=8, dtype=torch.float64),
    DispatchCase((7, 6), plan="rank0", multiple=16, dtype=torch.bfloat16),
    DispatchCase((9, 4), num_local_experts=4, num_slots=4, is_strided=True),
    DispatchCase((5, 0, 3, 64), num_local_experts=2, num_slots=5, dtype=torch.bfloat16),
    DispatchCase((1, 1, 1, 1), num_local_experts=4, num_slots=3, width=128, plan="rank0", multiple=4),
]


def engine_of(case):
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    setup = EngineSetup(group, case.num_local_experts, case.width, case.multiple)
    return shared_engine("hybridep", "collective", setup)


def run_job(cases):
    return [run_engine(engine_of(case), case, dist.get_rank()) for case in cases]


def check(pool, cases):
    """All cases have the same number of ranks."""
    results = pool.run(run_job, cases, world_size=cases[0].num_ranks)
    for i, case in enumerate(cases):
        for rank, expected in enumerate(expected_ranks(case)):
            assert_same(results[rank][i], expected, f"{case} rank {rank}")


def with_budgets(case):
    """Exact sizes, a budget that suffices, one that does not, and none at all."""
    enough = lossless_budget(case)
    for budget in (None, enough, enough // 3 // case.multiple * case.multiple, 0):
        yield dataclasses.replace(case, budget=budget)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_engine_is_the_loop_bit_for_bit(pool, case):
    check(pool, list(with_budgets(case)))


def test_one_rank_needs_no_group(pool):
    check(pool, [*with_budgets(DispatchCase((5,), num_local_experts=4)), DispatchCase((0,))])


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("num_slots", range(1, 9))
@pytest.mark.parametrize("tokens", [(0, 65), (64, 63), (3, 1, 0, 64)], ids=str)
def test_every_shape_is_the_loop_bit_for_bit(pool, tokens, num_slots, dtype):
    base = DispatchCase(tokens, num_slots=num_slots, dtype=dtype, width=128)
    cases = [
        dataclasses.replace(base, num_local_experts=experts, plan=plan, seed=experts)
        for experts in range(1, 9)
        for plan in ("random", "rank0")
        if experts * len(tokens) >= num_slots
    ]
    check(pool, [budgeted for case in cases for budgeted in with_budgets(case)])


def rounded_after_each_expert(rows, row_probs, slots, dtype):
    """`sum_rows` in the dtype of the rows: one rounding for each of a token's experts."""
    total = torch.zeros(len(slots), rows.shape[1], dtype=dtype)
    for slot in slots.unbind(1):
        total += rows[slot.clamp(min=0)].masked_fill(slot.unsqueeze(1) < 0, 0)
    return total, sum_rows(rows, row_probs, slots, dtype)[1]


def from_the_last_expert(rows, row_probs, slots, dtype):
    """`sum_rows` in the other order."""
    return sum_rows(rows, None, slots.flip(1), dtype)[0], sum_rows(rows, row_probs, slots, dtype)[1]


def wrong_sum_job(case, wrong_sum):
    with replaced(collective, "sum_rows", wrong_sum):
        return run_engine(engine_of(case), case, dist.get_rank())


WRONG_SUMS = [(rounded_after_each_expert, torch.bfloat16), (from_the_last_expert, torch.float32)]


@pytest.mark.parametrize(("wrong_sum", "dtype"), WRONG_SUMS)
def test_sum_of_other_roundings_or_order_is_noticed(pool, wrong_sum, dtype):
    case = DispatchCase((63, 65), num_local_experts=4, num_slots=8, dtype=dtype)
    for found, expected in zip(pool.run(wrong_sum_job, case, wrong_sum), expected_ranks(case), strict=True):
        assert torch.equal(found.rows, expected.rows)
        assert torch.equal(found.grad_probs, expected.grad_probs)
        assert not torch.equal(found.hidden, expected.hidden)
        assert not torch.equal(found.grad_hidden, expected.grad_hidden)


def overflow_job():
    """8 tokens per rank with two experts each, all of rank 0, and room for 16 rows; twice."""
    case = DispatchCase((8, 8), plan="rank0", budget=16)
    found = []
    for _ in range(2):
        inputs = make_inputs(case, dist.get_rank())
        inputs.ids = torch.tensor([[0, 1]] * 8, dtype=torch.int32)
        exchange = new_exchange(case, inputs)
        engine = engine_of(case)
        engine.prepare(exchange)
        rows, _ = engine.dispatch(exchange, inputs.hidden, inputs.probs)
        found.append((len(rows), int(exchange.dropped_rows), exchange.tokens_per_expert.tolist()))
    return found


def test_overflow_is_counted_every_time(pool):
    assert pool.run(overflow_job) == [[(16, 16, [16, 0])] * 2, [(16, 0, [0, 0])] * 2]


def live_bytes(at_most):
    """Bytes of live tensors, once gloo's threads have let go of what they sent, or after a second."""
    for _ in range(100):
        gc.collect()
        found = sum(t.nbytes for t in gc.get_objects() if isinstance(t, torch.Tensor))
        if found <= at_most:
            break
        time.sleep(0.01)
    return found


def live_tensors_job():
    """Bytes of live tensors before and after 100 exchanges."""
    case, before = DispatchCase((6, 3)), live_bytes(at_most=1 << 60)
    for step in range(100):
        run_engine(engine_of(case), dataclasses.replace(case, seed=step), dist.get_rank())
    return before, live_bytes(before)


def test_exchanges_leave_nothing_behind(pool):
    assert all(after <= before for before, after in pool.run(live_tensors_job))
