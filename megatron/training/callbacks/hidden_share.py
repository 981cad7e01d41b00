"""Measures in each step how much of the expert communication is hidden behind compute (--log-overlap)."""

from megatron.core import streams
from megatron.core.pipeline_parallel.overlap.meter import OverlapMeter
from megatron.training.callbacks.base import Callback
from megatron.training.train_state import StepResult, TrainingRun


class HiddenShare(Callback):
    """Watches the streams of each step and leaves the share with the run, for the log line."""

    def __init__(self) -> None:
        self._meter = OverlapMeter()

    def on_step_start(self, run: TrainingRun) -> None:
        streams.set_observer(self._meter)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        streams.set_observer(None)
        run.hidden_share = self._meter.take_share()

    def on_train_end(self, run: TrainingRun) -> None:
        streams.set_observer(None)
