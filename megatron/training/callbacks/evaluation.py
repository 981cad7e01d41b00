"""Validation at fixed intervals during training."""

import logging

from megatron.core.utils.logging import get_logger, log_single_rank
from megatron.training.callbacks.base import Callback
from megatron.training.evaluation import evaluate_and_print
from megatron.training.train_state import StepResult, TrainingRun

logger = get_logger(__name__)


class PeriodicEvaluation(Callback):
    """Evaluates on the validation set every `interval` iterations."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_train_start(self, run: TrainingRun) -> None:
        if run.valid_iterator is None:
            text = f"eval_interval={self.interval}: no effect, there is no validation data"
            log_single_rank(logger, logging.WARNING, text)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.valid_iterator is not None and run.state.iteration % self.interval == 0:
            evaluate_and_print(run, run.valid_iterator, f"iteration {run.state.iteration}")
