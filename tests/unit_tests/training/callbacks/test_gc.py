"""Manual garbage collection happens at its interval and nowhere else."""

import gc
from types import SimpleNamespace

from megatron.training.callbacks.gc import ManualGC
from megatron.training.train_state import StepResult, TrainState


def test_collects_at_the_interval_only():
    run = SimpleNamespace(state=TrainState())
    callback = ManualGC(interval=2, around_evaluation=False)
    generations = []
    gc.callbacks.append(lambda phase, info: generations.append(run.state.iteration) if phase == "start" else None)
    try:
        callback.on_train_start(run)
        assert not gc.isenabled()
        for run.state.iteration in (1, 2, 3, 4):
            callback.on_step_end(run, StepResult({}))
    finally:
        gc.callbacks.pop()
        callback.on_train_end(run)
    assert generations == [0, 2, 4]
    assert gc.isenabled()
