"""Pairs of a forward and a backward: what they look like, and that neither needs the other."""

from itertools import product

import pytest

from megatron.core.pipeline_parallel.actions import ActionKind, PlanShape
from megatron.core.pipeline_parallel.plan_checks import check_schedule
from megatron.core.pipeline_parallel.plans import build_plan, build_plans


def text(name, **sizes):
    work = [action for action in build_plan(name, PlanShape(**sizes)) if action.direction is None]
    return " ".join(map(str, work))


@pytest.mark.parametrize(
    ("num_microbatches", "plan"),
    [(1, "F0.0 B0.0"), (2, "F0.0 F0.1|B0.0 B0.1"), (3, "F0.0 F0.1|B0.0 F0.2|B0.1 B0.2")],
)
def test_one_stage_pairs_each_forward_with_the_backward_before_it(num_microbatches, plan):
    assert text("no_pipelining_overlap", num_microbatches=num_microbatches) == plan


def test_interleaved_pipeline_warms_up_one_forward_longer():
    sizes = {"num_microbatches": 4, "num_chunks": 2, "pp_size": 2}
    assert text("interleaved", pp_rank=1, **sizes).startswith("F0.0 F0.1 F1.0 B1.0 F1.1 B1.1")
    assert text("interleaved_overlap", pp_rank=1, **sizes).startswith("F0.0 F0.1 F1.0 F1.1|B1.0 F0.2|B1.1")


def test_delayed_weight_gradients_follow_the_messages_of_their_pair():
    shape = PlanShape(2, num_chunks=2, pp_size=2, pp_rank=1, delays_wgrad=True)
    plan = " ".join(map(str, build_plan("interleaved_overlap", shape)))
    assert "F1.1|B1.0 send(B1.0,0) W1.0" in plan
    assert plan.endswith("B0.1 send(B0.1,0) W0.1")
    assert "W" not in text("no_pipelining_overlap", num_microbatches=2, delays_wgrad=True)


@pytest.mark.parametrize("delays_wgrad", [False, True])
@pytest.mark.parametrize(("pp", "vpp"), list(product((2, 3, 4), (2, 3))))
def test_all_sizes_run_and_no_pair_is_of_one_microbatch_and_chunk(pp, vpp, delays_wgrad):
    for groups in (1, 2, 3):
        shape = PlanShape(groups * pp, num_chunks=vpp, pp_size=pp, delays_wgrad=delays_wgrad)
        check_schedule("interleaved_overlap", shape)
        pairs = [a for plan in build_plans("interleaved_overlap", shape) for a in plan if a.kind is ActionKind.OVERLAP]
        assert all((pair.chunk, pair.microbatch) != (pair.backward.chunk, pair.backward.microbatch) for pair in pairs)


def test_peaks_are_one_above_those_of_the_plain_schedule():
    shape = PlanShape(8, pp_size=4, num_chunks=2)
    assert check_schedule("interleaved_overlap", shape) == [12, 10, 8, 6]
    assert check_schedule("no_pipelining_overlap", PlanShape(8)) == [2]
