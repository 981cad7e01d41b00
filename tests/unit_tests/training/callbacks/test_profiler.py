"""The profiler writes one trace per profiled rank, for the asked steps."""

import argparse
import json
from types import SimpleNamespace

import pytest
import torch

from megatron.training.callbacks.profiler import Profiler, is_profiled
from megatron.training.train_state import StepResult, TrainState


def arguments(tmp_path, **changes):
    settings = {
        "profile": True,
        "profile_step_start": 1,
        "profile_step_end": 2,
        "profile_ranks": [],
        "use_pytorch_profiler": True,
        "pytorch_profiler_collect_shapes": False,
        "pytorch_profiler_collect_callstack": False,
        "tensorboard_dir": str(tmp_path),
    }
    return argparse.Namespace(**settings | changes)


def test_trace_holds_the_profiled_step_only(tmp_path):
    profiler, run = Profiler(arguments(tmp_path)), SimpleNamespace(state=TrainState())
    for step in range(3):
        profiler.on_step_start(run)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(2).sum()
        run.state.iteration += 1
        profiler.on_step_end(run, StepResult({}))
    profiler.on_train_end(run)
    events = json.loads((tmp_path / "profile" / "rank-0.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if str(event.get("name", "")).startswith("step ")} == {"step 1"}


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, True), ({"profile_ranks": [1]}, False), ({"profile": False}, False)]
)
def test_empty_list_of_ranks_means_all(tmp_path, changes, expected):
    assert is_profiled(arguments(tmp_path, **changes)) is expected
