"""The checker of plans finds each fault that is put into a good plan."""

from itertools import pairwise

import pytest

from megatron.core.pipeline_parallel.actions import Action, ActionKind, Direction, PlanShape, backward, forward, overlap
from megatron.core.pipeline_parallel.plan_checks import PlanError, check_plans
from megatron.core.pipeline_parallel.plans import build_plans
from megatron.core.pipeline_parallel.plans.transfers import add_transfers
from megatron.core.pipeline_parallel.timeline import make_timeline

SHAPE = PlanShape(4, num_chunks=2, pp_size=2)


def good():
    return [list(plan) for plan in build_plans("interleaved", SHAPE)]


def find(plan, text):
    return [str(action) for action in plan].index(text)


def swap(plan, first, second):
    i, j = find(plan, first), find(plan, second)
    plan[i], plan[j] = plan[j], plan[i]


def test_a_good_plan_passes():
    assert check_plans(good(), SHAPE, [5, 3]) == [5, 3]


def test_any_two_sends_in_the_wrong_order_are_found():
    sends = [str(a) for a in good()[0] if a.kind is ActionKind.SEND]
    for first, second in pairwise(sends):
        plans = good()
        swap(plans[0], first, second)
        with pytest.raises(PlanError, match="rank 0"):
            check_plans(plans, SHAPE)


def test_sends_in_another_order_than_receives_are_not_the_same_message():
    plans = good()
    first = plans[0].pop(find(plans[0], "send(F0.0,1)"))
    plans[0].insert(find(plans[0], "send(F0.1,1)") + 1, first)
    with pytest.raises(PlanError, match=r"rank 0 is at send\(F0.1,1\), rank 1 at recv\(F0.0,0\): not the same message"):
        check_plans(plans, SHAPE)


def test_two_ranks_that_both_receive_first_deadlock():
    shape = PlanShape(1, pp_size=2)
    plans = [list(plan) for plan in build_plans("1f1b", shape)]
    wait = [Action(ActionKind.RECV, 0, 0, Direction.GRADIENT, peer=1)]
    plans[0] = wait + [action for action in plans[0] if action.kind is not ActionKind.RECV]
    with pytest.raises(PlanError, match=r"deadlock: rank 0 at recv\(B0.0,1\), rank 1 at recv\(F0.0,0\)"):
        check_plans(plans, shape)


@pytest.mark.parametrize(
    ("rank", "dropped", "message"),
    [
        (0, "F0.2", "rank 0: F0.2 runs 0 times"),
        (1, "B1.3", "rank 1: B1.3 runs 0 times"),
        (1, "recv(F0.1,0)", r"rank 1: F0.1 comes before recv\(F0.1\)"),
        (0, "recv(B0.1,1)", r"rank 0: B0.1 comes before recv\(B0.1\)"),
        (0, "send(F1.1,1)", "rank 0: never sent: F1.1"),
    ],
)
def test_a_missing_action_is_named(rank, dropped, message):
    plans = good()
    del plans[rank][find(plans[rank], dropped)]
    with pytest.raises(PlanError, match=message):
        check_plans(plans, SHAPE)


def test_work_twice_or_unknown_or_in_the_wrong_order_is_named():
    for position, action, message in [
        (0, forward(0, 0), "F0.0 runs 2 times"),
        (0, forward(0, 7), "no such work in this step: F0.7"),
        (0, Action(ActionKind.RECOMPUTE, 0, 1), "R0.1 comes before F0.1"),
        (0, Action(ActionKind.SEND, 0, 1, Direction.ACTIVATION, 1), r"send\(F0.1,1\) sends what is not there"),
    ]:
        plans = good()
        plans[0].insert(position, action)
        with pytest.raises(PlanError, match=message):
            check_plans(plans, SHAPE)
    plans = good()
    swap(plans[1], "F1.0", "B1.0")
    with pytest.raises(PlanError, match=r"rank 1: B1.0 comes before F1.0"):
        check_plans(plans, SHAPE)


def test_more_in_flight_than_declared_is_an_error():
    with pytest.raises(PlanError, match="rank 1: 3 microbatches in flight, 2 declared"):
        check_plans(good(), SHAPE, [5, 2])


def test_weight_gradients_come_once_and_after_their_backward():
    shape = PlanShape(2)
    wgrad = [Action(ActionKind.WGRAD, 0, i) for i in range(2)]
    plan = [forward(0, 0), overlap(forward(0, 1), backward(0, 0)), wgrad[0], backward(0, 1), wgrad[1]]
    assert check_plans([plan], shape, [2]) == [2]
    assert [span.end for span in make_timeline([plan], shape)[0]] == [1, 4, 4, 6, 6]
    with pytest.raises(PlanError, match=r"W0.1 runs 0 times"):
        check_plans([plan[:-1]], shape)
    with pytest.raises(PlanError, match=r"W0.1 comes before B0.1"):
        check_plans([[*plan[:-2], wgrad[1], backward(0, 1)]], shape)


def test_weight_gradients_that_run_before_their_message_hide_nothing():
    shape = PlanShape(2, num_chunks=2, pp_size=2, delays_wgrad=True)
    plans = [list(plan) for plan in build_plans("interleaved_overlap", shape)]
    check_plans(plans, shape)
    swap(plans[0], "send(B1.0,1)", "W1.0")
    with pytest.raises(PlanError, match=r"rank 0: W1.0 comes before the gradient is sent"):
        check_plans(plans, shape)


def test_messages_of_a_pair_follow_the_pair():
    shape = PlanShape(2, pp_size=2)
    last = [forward(0, 0), overlap(forward(0, 1), backward(0, 0)), backward(0, 1)]
    plans = add_transfers([[forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)], last], shape)
    check_plans(plans, shape)
    assert " ".join(map(str, plans[1])) == ("recv(F0.0,0) F0.0 recv(F0.1,0) F0.1|B0.0 send(B0.0,0) B0.1 send(B0.1,0)")


def test_ranks_whose_orders_contradict_each_other_have_no_timeline():
    shape = PlanShape(1, pp_size=2)
    with pytest.raises(ValueError, match=r"wait for each other: rank 0: B0.0; rank 1: B0.0"):
        make_timeline([[backward(0, 0), forward(0, 0)], [backward(0, 0), forward(0, 0)]], shape)
