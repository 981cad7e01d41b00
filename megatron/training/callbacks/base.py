"""The hooks of the training loop, and the list that calls them in order.

    on_train_start
      repeat: on_step_start, (the step), on_step_end; or on_step_passed_over
      around every evaluation: on_evaluate_start, on_evaluate_end
    on_train_end            also when the loop leaves through an exception

Callbacks run in the order of the list on every hook. Every rank has the same list, so a hook may communicate.
"""

from collections.abc import Iterable

from megatron.training.train_state import StepResult, TrainingRun


class Callback:
    """A participant of the loop; override the hooks that matter."""

    def on_train_start(self, run: TrainingRun) -> None:
        """Called once before the first step."""

    def on_step_start(self, run: TrainingRun) -> None:
        """Called before each step, when `run.state.iteration` counts the steps already done."""

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        """Called after each step, when `run.state` already counts it."""

    def on_step_passed_over(self, run: TrainingRun) -> None:
        """Called instead of the two step hooks for an iteration whose data is consumed without a step."""

    def on_evaluate_start(self, run: TrainingRun) -> None:
        """Called before each evaluation, inside and after training."""

    def on_evaluate_end(self, run: TrainingRun) -> None:
        """Called after each evaluation."""

    def on_train_end(self, run: TrainingRun) -> None:
        """Called once when the loop ends, by whatever way; must not communicate."""


class CallbackList(Callback):
    """Calls every callback in order; itself a callback."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_train_start(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.on_train_start(run)

    def on_step_start(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.on_step_start(run)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        for callback in self.callbacks:
            callback.on_step_end(run, result)

    def on_step_passed_over(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.on_step_passed_over(run)

    def on_evaluate_start(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.on_evaluate_start(run)

    def on_evaluate_end(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.on_evaluate_end(run)

    def on_train_end(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.on_train_end(run)
