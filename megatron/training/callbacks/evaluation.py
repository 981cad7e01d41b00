"""Validation at fixed intervals during training."""

from megatron.training.callbacks.base import Callback
from megatron.training.evaluation import evaluate_and_print
from megatron.training.train_state import StepResult, TrainingRun


class PeriodicEvaluation(Callback):
    """Evaluates on the validation set every `interval` iterations."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.state.iteration % self.interval == 0:
            evaluate_and_print(run, run.valid_iterator, f"iteration {run.state.iteration}")
