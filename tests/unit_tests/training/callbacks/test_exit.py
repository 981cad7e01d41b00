"""Exit conditions: order and texts."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from megatron.training.callbacks.exit import ExitConditions
from megatron.training.train_state import StepResult, TrainState


def run_at(iteration):
    return SimpleNamespace(state=TrainState(iteration=iteration), device=torch.device("cpu"), exit_reason=None)


def conditions(**changes):
    settings = {"exit_signal": None, "duration_minutes": None, "interval": None, "start_time": time.monotonic()}
    return ExitConditions(**settings | changes)


@pytest.mark.parametrize(("iteration", "reason"), [(3, None), (4, "exiting program at iteration 4")])
def test_interval_ends_at_its_multiple(iteration, reason):
    run = run_at(iteration)
    conditions(interval=4).on_step_end(run, StepResult({}))
    assert run.exit_reason == reason


def test_time_limit_counts_from_program_start():
    run = run_at(1)
    conditions(duration_minutes=2, start_time=time.monotonic() - 121).on_step_end(run, StepResult({}))
    assert run.exit_reason == "exiting program after 2.0 minutes"


def test_signal_wins_and_the_old_handler_returns():
    before = signal.getsignal(signal.SIGTERM)
    callback, run = conditions(exit_signal=int(signal.SIGTERM), interval=1), run_at(1)
    callback.on_train_start(run)
    os.kill(os.getpid(), signal.SIGTERM)
    callback.on_step_end(run, StepResult({}))
    callback.on_train_end(run)
    assert run.exit_reason == "exiting program after receiving SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
