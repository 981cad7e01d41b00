"""Python garbage collection at fixed steps, so that all ranks pause together instead of one after the other."""

import gc

from megatron.training.callbacks.base import Callback
from megatron.training.train_state import StepResult, TrainingRun


class ManualGC(Callback):
    """Turns automatic collection off and collects every `interval` steps (0: never) and around evaluations."""

    def __init__(self, interval: int, around_evaluation: bool) -> None:
        self.interval = interval
        self.around_evaluation = around_evaluation

    def on_train_start(self, run: TrainingRun) -> None:
        gc.disable()
        gc.collect()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if self.interval and run.state.iteration % self.interval == 0:
            gc.collect()

    def on_evaluate_start(self, run: TrainingRun) -> None:
        if self.around_evaluation:
            gc.collect()

    def on_evaluate_end(self, run: TrainingRun) -> None:
        # Only the youngest generation: what the evaluation itself left behind.
        if self.around_evaluation:
            gc.collect(generation=0)

    def on_train_end(self, run: TrainingRun) -> None:
        gc.enable()
