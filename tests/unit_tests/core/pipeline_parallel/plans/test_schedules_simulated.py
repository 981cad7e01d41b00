"""Every registered schedule, on all ranks of a pipeline at once, without communication."""

from itertools import product

import pytest

from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel.actions import PlanShape
from megatron.core.pipeline_parallel.plan_checks import check_schedule
from megatron.core.pipeline_parallel.plans import build_plans
from megatron.core.pipeline_parallel.schedules import plan_name
from megatron.core.pipeline_parallel.timeline import bubble, make_timeline

MICROBATCHES = range(1, 10)


def text(name, **sizes):
    return [" ".join(map(str, (a for a in plan if a.peer is None))) for plan in build_plans(name, PlanShape(**sizes))]


def test_1f1b_alternates_after_a_run_up_that_is_shorter_on_later_ranks():
    assert text("1f1b", num_microbatches=4, pp_size=3) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3",
    ]


def test_interleaved_groups_go_through_all_chunks():
    assert text("interleaved", num_microbatches=2, pp_size=2, num_chunks=2) == [
        "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1",
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1",
    ]


def test_group_size_sets_how_many_microbatches_follow_each_other():
    plans = text("interleaved", num_microbatches=3, pp_size=2, num_chunks=2, microbatch_group_size=3)
    assert plans[1] == "F0.0 F0.1 F0.2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 B0.0 B0.1 B0.2"


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("pp", "vpp"), list(product((1, 2, 3, 4), (1, 2, 3))))
def test_all_sizes_run_or_are_refused_by_the_group_rule(pp, vpp, forward_only):
    for microbatches, group in product(MICROBATCHES, [None] if vpp == 1 else [None, pp + 1, 2 * pp]):
        shape = PlanShape(microbatches, forward_only, vpp, pp, microbatch_group_size=group)
        size = group or pp
        fits = size <= microbatches and (microbatches % size == 0 or microbatches % size >= pp)
        if pp == 1 and vpp > 1:
            with pytest.raises(ConfigError, match="chunks interleave over at least 2 stages"):
                plan_name(shape)
        elif vpp == 1 or fits or forward_only:
            check_schedule(plan_name(shape), shape)
        else:
            with pytest.raises(ConfigError, match="microbatch_group_size_per_vp_stage"):
                check_schedule(plan_name(shape), shape)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_microbatches": 1}, "use at least 2 microbatches"),
        ({"num_microbatches": 5}, "the last group has 1 microbatches .* use 4 or 6 microbatches, or .* 5"),
        ({"num_microbatches": 4, "microbatch_group_size": 1}, "-virtual-pipeline-stage to 2 or more"),
        ({"num_microbatches": 4, "microbatch_group_size": 6}, "use at least 6 microbatches"),
    ],
)
def test_a_group_that_does_not_fit_is_refused_with_one_that_does(sizes, message):
    with pytest.raises(ConfigError, match=message):
        build_plans("interleaved", PlanShape(pp_size=2, num_chunks=2, **sizes))


def test_peaks_are_those_of_the_formula():
    assert check_schedule("1f1b", PlanShape(8, pp_size=4)) == [4, 3, 2, 1]
    assert check_schedule("1f1b", PlanShape(2, pp_size=4)) == [2, 2, 2, 1]
    assert check_schedule("interleaved", PlanShape(8, pp_size=4, num_chunks=2)) == [11, 9, 7, 5]


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8)])
def test_bubble_of_1f1b_is_p_minus_1_over_all_slots(pp, microbatches):
    shape = PlanShape(microbatches, pp_size=pp)
    share = bubble(make_timeline(build_plans("1f1b", shape), shape))
    assert share == pytest.approx((pp - 1) / (microbatches + pp - 1))


def test_two_chunks_halve_the_bubble():
    shape = PlanShape(8, num_chunks=2, pp_size=4)
    share = bubble(make_timeline(build_plans("interleaved", shape), shape))
    assert share == pytest.approx((3 / 2) / (8 + 3 / 2))
