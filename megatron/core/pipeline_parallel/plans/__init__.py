"""Schedules by name.

A schedule is a pure function from sizes and rank to what that rank computes, in order; `build_plan` adds the messages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.core.pipeline_parallel.actions import Action, PlanShape
from megatron.core.pipeline_parallel.plans import combined, interleaved, no_pipelining, one_f_one_b
from megatron.core.pipeline_parallel.plans.transfers import add_transfers


@dataclass(frozen=True)
class Schedule:
    """One way to order the work."""

    compute: Callable[[PlanShape], list[Action]]
    """What one rank computes, in order."""
    peak_in_flight: Callable[[PlanShape], int]
    """The most (chunk, microbatch) pairs between their forward and their backward on that rank."""


PLANS: dict[str, Schedule] = {
    "no_pipelining": Schedule(no_pipelining.no_pipelining, no_pipelining.peak_in_flight),
    "no_pipelining_overlap": Schedule(combined.combined_no_pipelining, combined.no_pipelining_peak),
    "1f1b": Schedule(one_f_one_b.one_f_one_b, one_f_one_b.peak_in_flight),
    "interleaved": Schedule(interleaved.interleaved, interleaved.peak_in_flight),
    "interleaved_overlap": Schedule(combined.combined_interleaved, combined.interleaved_peak),
}


def build_plan(name: str, shape: PlanShape) -> tuple[Action, ...]:
    """Return the complete list of actions of rank `shape.pp_rank`."""
    return build_plans(name, replace(shape, pp_rank=0))[shape.pp_rank]


@lru_cache(maxsize=32)
def build_plans(name: str, shape: PlanShape) -> tuple[tuple[Action, ...], ...]:
    """Return the complete lists of all pipeline ranks."""
    schedule = PLANS[name]
    work = [schedule.compute(replace(shape, pp_rank=rank)) for rank in range(shape.pp_size)]
    return tuple(tuple(plan) for plan in add_transfers(work, shape))
