"""The progress bar: on a terminal only."""

import io
import sys
from types import SimpleNamespace

import pytest

from megatron.training.callbacks.progress import ProgressBar, is_terminal
from megatron.training.train_state import PutOff, StepResult, TrainState


@pytest.mark.parametrize("is_tty", [True, False])
def test_bar_is_for_terminals(monkeypatch, is_tty):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: is_tty))
    assert is_terminal() is is_tty


def test_bar_shows_iterations_and_the_latest_loss(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run = SimpleNamespace(args=SimpleNamespace(train_iters=4), state=TrainState(), put_off=PutOff())
    bar = ProgressBar()
    bar.on_train_start(run)
    for run.state.iteration in (1, 2, 4):
        bar.on_step_end(run, StepResult({"lm loss": 2.5}))
    assert bar.iterations_shown == 4
    bar.on_train_end(run)
    assert "lm loss=2.500" in stream.getvalue()
