"""Ways to end a run before its last iteration: a signal, a time limit, an iteration interval.

Ranks must leave at the same step, so a signal or a clock that only one rank has seen is agreed upon first: one MAX
all-reduce of two numbers per step, only if one of the two is asked for.
"""

import signal
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron.training.callbacks.base import Callback
from megatron.training.train_state import StepResult, TrainingRun


class ExitConditions(Callback):
    """Sets `run.exit_reason` when a condition holds; checks them in the order signal, duration, interval.

    Args:
        exit_signal: the signal to catch, or None to catch none.
        duration_minutes: minutes after program start, or None.
        interval: end when the iteration is divisible by it, or None.
        start_time: program start in seconds of `time.monotonic`.
    """

    def __init__(
        self,
        exit_signal: int | None,
        duration_minutes: float | None,
        interval: int | None,
        start_time: float,
    ) -> None:
        self.exit_signal = exit_signal
        self.duration_minutes = duration_minutes
        self.interval = interval
        self.start_time = start_time
        self._signal_seen = False
        self._previous_handler: Any = None

    def on_train_start(self, run: TrainingRun) -> None:
        if self.exit_signal is not None:
            self._previous_handler = signal.signal(self.exit_signal, self._note_signal)

    def _note_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signal_seen = True

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        signalled, minutes = self._agree(run.device)
        if signalled:
            run.exit_reason = f"exiting program after receiving {signal.Signals(self.exit_signal).name}"
        elif self.duration_minutes is not None and minutes > self.duration_minutes:
            run.exit_reason = f"exiting program after {minutes:.1f} minutes"
        elif self.interval and run.state.iteration % self.interval == 0:
            run.exit_reason = f"exiting program at iteration {run.state.iteration}"

    def _agree(self, device: torch.device) -> tuple[bool, float]:
        """Whether any rank saw the signal, and the longest time of any rank in minutes."""
        minutes = (time.monotonic() - self.start_time) / 60.0
        if self.exit_signal is None and self.duration_minutes is None:
            return False, minutes
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._signal_seen, minutes
        shared = torch.tensor([float(self._signal_seen), minutes], dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        signalled, minutes = shared.tolist()
        return bool(signalled), minutes

    def on_train_end(self, run: TrainingRun) -> None:
        if self.exit_signal is not None and self._previous_handler is not None:
            signal.signal(self.exit_signal, self._previous_handler)
