"""Flags of a guarded step, and the way back."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import step_guard
from megatron.core.step_guard import Rollback, StepGuard, guarding

CPU = torch.device("cpu")


def test_rows_within_the_budget_raise_nothing_and_leave_the_load():
    guard = StepGuard(CPU)
    guard.report_rows(torch.tensor([3, 8]), budget=8, num_balanced=4.0)
    guard.report_rows(torch.tensor([2, 2]), budget=8, num_balanced=4.0)
    assert guard.flags.tolist() == [0.0, 0.0, 2.0]
    assert guard.raised().item() == 0.0


def test_one_row_too_many_raises_the_guard_until_the_next_step():
    guard = StepGuard(CPU)
    guard.report_rows(torch.tensor([9, 1]), budget=8, num_balanced=4.0)
    guard.report_rows(torch.tensor([1, 1]), budget=8, num_balanced=4.0)
    assert guard.flags.tolist() == [1.0, 0.0, 2.25]
    assert guard.raised().item() == 1.0
    guard.begin()
    assert guard.flags.tolist() == [0.0, 0.0, 0.0]


def test_high_load_alone_does_not_raise_the_guard():
    guard = StepGuard(CPU)
    guard.report_rows(torch.tensor([100]), budget=100, num_balanced=1.0)
    assert guard.raised().item() == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_value_that_is_not_finite_raises_exactly_one(value):
    guard = StepGuard(CPU)
    guard.report_values(torch.tensor([1.0, value]))
    assert guard.flags.tolist() == [0.0, 1.0, 0.0]
    assert guard.raised().item() == 1.0


def test_flag_of_the_loss_scale_counts_once_however_large():
    guard = StepGuard(CPU)
    guard.report_non_finite(torch.tensor([3.0]))
    assert guard.raised().item() == 1.0


def flags_after_agreement():
    guard = StepGuard(CPU)
    if dist.get_rank() == 1:
        guard.report_rows(torch.tensor([5]), budget=4, num_balanced=2.0)
    guard.agree(dist.group.WORLD)
    return guard.flags.tolist()


def test_all_ranks_see_the_overflow_of_one(pool):
    assert pool.run(flags_after_agreement, world_size=2) == [[1.0, 0.0, 2.5]] * 2


def test_rollback_restores_bits_in_place():
    counts, bias = torch.arange(4), torch.tensor([0.1, float("nan")])
    rollback = Rollback([counts, bias])
    rollback.save()
    before, address = bias.clone(), bias.data_ptr()
    counts += 1
    bias.zero_()
    rollback.restore()
    assert counts.tolist() == [0, 1, 2, 3]
    assert torch.equal(bias.view(torch.int32), before.view(torch.int32))
    assert bias.data_ptr() == address


def test_rollback_knows_what_it_covers():
    tensor, other = torch.zeros(2), torch.zeros(2)
    assert Rollback([tensor]).covers([tensor])
    assert not Rollback([tensor]).covers([tensor, other])
    assert not Rollback([tensor]).covers([other])


def test_budget_is_known_only_to_a_guarded_step():
    assert step_guard.row_factor() is None
    with guarding(StepGuard(CPU, 1.5)):
        assert step_guard.row_factor() == 1.5
        assert step_guard.active() is not None
    assert step_guard.active() is None


def test_guarded_steps_do_not_nest():
    with (
        guarding(StepGuard(CPU)),
        pytest.raises(AssertionError, match="inside a guarded step"),
        guarding(StepGuard(CPU)),
    ):
        pass
