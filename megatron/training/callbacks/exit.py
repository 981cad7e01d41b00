"""Ways to end a run before its last iteration: a signal, a time limit, an iteration interval.

Ranks must leave at the same step, so a signal or a clock that only one rank has seen is agreed upon first: one MAX
all-reduce of two numbers per step, only if one of the two is asked for. All then save, if the run saves, and exit with
code 0. A rank that has the signal and cannot reach that agreement, because another rank hangs or is gone, ends after a
short time with code 1, and nobody saves: the checkpoints of before stay as they are. Launchers allow some time between
SIGTERM and SIGKILL (torchrun 30 s); a save that takes longer is lost, and leaves no trace that would be loaded.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable

import torch

from megatron.core.utils.collectives import MAX, all_reduce, world_group
from megatron.core.utils.logging import get_logger, get_rank
from megatron.training.callbacks.base import Callback
from megatron.training.signal_watch import SignalWatch
from megatron.training.train_state import StepResult, TrainingRun

logger = get_logger(__name__)

AGREEMENT_TIMEOUT_S = 10.0
"""Time without progress, after the signal, that ends the run; or `STEPS_OF_PATIENCE` times the longest step."""
STEPS_OF_PATIENCE = 3


class ExitConditions(Callback):
    """Sets `run.exit_reason` when a condition holds; checks them in the order signal, duration, interval.

    Args:
        exit_signal: the signal to catch, or None to catch none.
        duration_minutes: minutes after program start, or None.
        interval: end when the iteration is divisible by it, or None.
        start_time: program start in seconds of `time.monotonic`.
        report: says which ranks are behind; for the message when ranks cannot agree.
    """

    def __init__(
        self,
        exit_signal: int | None,
        duration_minutes: float | None,
        interval: int | None,
        start_time: float,
        report: Callable[[], str] = str,
    ) -> None:
        self.exit_signal = exit_signal
        self.duration_minutes = duration_minutes
        self.interval = interval
        self.start_time = start_time
        self._report = report
        self._watch: SignalWatch | None = None
        self._longest_step_s = 0.0
        self._last_step_end: float | None = None

    def on_train_start(self, run: TrainingRun) -> None:
        if self.exit_signal is not None:
            give_up = None if world_group() is None else self._give_up
            self._watch = SignalWatch(self.exit_signal, self._patience_s, give_up)
            self._watch.start()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        signalled, minutes = self._agree(run.device)
        if signalled and self._watch is not None:
            self._watch.settle()
            run.exit_reason = f"exiting program after receiving {signal.Signals(self._watch.signum).name}"
        elif self.duration_minutes is not None and minutes > self.duration_minutes:
            run.exit_reason = f"exiting program after {minutes:.1f} minutes"
        elif self.interval and run.state.iteration % self.interval == 0:
            run.exit_reason = f"exiting program at iteration {run.state.iteration}"
        now = time.monotonic()
        if self._last_step_end is not None:
            self._longest_step_s = max(self._longest_step_s, now - self._last_step_end)
        self._last_step_end = now

    def _agree(self, device: torch.device) -> tuple[bool, float]:
        """Whether any rank saw the signal, and the longest time of any rank in minutes."""
        is_seen = self._watch is not None and self._watch.is_seen
        minutes = (time.monotonic() - self.start_time) / 60.0
        if self.exit_signal is None and self.duration_minutes is None:
            return False, minutes
        shared = torch.tensor([float(is_seen), minutes], dtype=torch.float64, device=device)
        all_reduce(shared, world_group(), op=MAX)
        signalled, minutes = shared.tolist()
        return bool(signalled), minutes

    def _patience_s(self) -> float:
        return max(AGREEMENT_TIMEOUT_S, STEPS_OF_PATIENCE * self._longest_step_s)

    def _give_up(self) -> None:
        """End the process from the watching thread: the main thread waits in a collective and cannot be woken."""
        logger.error(
            "[rank %d] the ranks cannot agree to exit after the signal: no progress for %.0f s; nothing is saved. %s",
            get_rank(),
            self._patience_s(),
            self._report(),
        )
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)

    def on_train_end(self, run: TrainingRun) -> None:
        if self._watch is not None:
            self._watch.stop()
