"""The plan of a model that is whole on each rank."""

import pytest

from megatron.core.pipeline_parallel.actions import PlanShape
from megatron.core.pipeline_parallel.plans import build_plan


def plan(shape):
    return " ".join(str(action) for action in build_plan("no_pipelining", shape))


def test_training_alternates_forward_and_backward():
    assert plan(PlanShape(num_microbatches=3)) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"


def test_evaluation_has_no_backward():
    assert plan(PlanShape(num_microbatches=2, forward_only=True)) == "F0.0 F0.1"


def test_stages_are_refused():
    with pytest.raises(AssertionError, match="one stage with one chunk"):
        plan(PlanShape(num_microbatches=2, pp_size=2))
