"""Which budget comes next, and what goes back before it."""

from collections import Counter

import pytest
import torch

from megatron.training.overflow_rerun import OverflowRerun, StepReport

CPU = torch.device("cpu")


def rerun(budgets, needed):
    """Perform one step that needs `needed` x a balanced load; returns what each attempt saw and the outcome."""
    module = torch.nn.Module()
    module.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
    steps = OverflowRerun(budgets, CPU, Counter())
    steps.watch([module])
    seen = []

    def attempt(budget):
        steps.rollback.save()
        seen.append((budget, module.counts.tolist(), torch.rand(1).item()))
        module.counts += 1
        is_overflow = budget is not None and needed > budget
        return StepReport(is_overflow, False, 0.0 if budget is None else needed, [])

    report, num_overflows = steps.run(attempt)
    return steps, module, seen, report, num_overflows


def test_step_that_fits_runs_once():
    steps, module, seen, report, num_overflows = rerun([1.2, 2.0, None], needed=1.1)
    assert [budget for budget, _, _ in seen] == [1.2]
    assert (num_overflows, report.row_load, steps.counters["row overflows"]) == (0, 1.1, 0)
    assert module.counts.tolist() == [1, 1]


@pytest.mark.parametrize(("needed", "used"), [(1.5, [1.2, 2.0]), (3.0, [1.2, 2.0, None])])
def test_each_attempt_starts_from_the_same_state_and_numbers(needed, used):
    steps, module, seen, report, num_overflows = rerun([1.2, 2.0, None], needed)
    assert [budget for budget, _, _ in seen] == used
    assert len({(tuple(counts), number) for _, counts, number in seen}) == 1
    assert (num_overflows, report.row_load) == (len(used) - 1, needed)
    assert steps.counters["row overflows"] == len(used) - 1
    assert module.counts.tolist() == [1, 1]


def test_recommendation_has_room_above_the_highest_load():
    steps, *_ = rerun([1.2, None], needed=1.5)
    assert steps.recommendation() == "highest load so far 1.500: --moe-expert-rank-capacity-factor 1.58 holds it"


def test_buffer_that_appears_later_is_covered_too():
    module = torch.nn.Module()
    steps = OverflowRerun([None], CPU, Counter())
    steps.watch([module])
    module.register_buffer("late", torch.ones(1))
    steps.watch([module])
    steps.rollback.save()
    module.late.zero_()
    steps.rollback.restore()
    assert module.late.tolist() == [1.0]
