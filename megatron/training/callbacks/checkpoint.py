"""Saves while training: at intervals, after the last step, and when another callback ends the run."""

from megatron.training.callbacks.base import Callback
from megatron.training.checkpointing import CheckpointWriter
from megatron.training.train_state import StepResult, TrainingRun


class PeriodicCheckpoint(Callback):
    """Stands after the callbacks that may set `run.exit_reason`, so that such a step ends with a save."""

    def __init__(self, writer: CheckpointWriter, interval: int | None) -> None:
        self.writer = writer
        self.interval = interval

    def on_train_start(self, run: TrainingRun) -> None:
        self.writer.note_start(run)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        self._save_if_due(run)

    def on_step_passed_over(self, run: TrainingRun) -> None:
        self._save_if_due(run)

    def _save_if_due(self, run: TrainingRun) -> None:
        is_last = run.exit_reason is not None or run.state.iteration >= run.args.train_iters
        if is_last or (self.interval and run.state.iteration % self.interval == 0):
            run.put_off.do()
            self.writer.save(run)
            run.counters["checkpoints"] += 1
        else:
            self.writer.poll()
        if is_last:
            self.writer.finish()

    def on_train_end(self, run: TrainingRun) -> None:
        self.writer.close()
