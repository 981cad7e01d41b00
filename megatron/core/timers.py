"""Named wall-clock timers that a training step starts and stops, reported over all ranks.

A timer has a level: 0 is always measured, 1 and 2 only if `--timing-log-level` reaches it; the others are replaced by
one object that does nothing. On a GPU start and stop wait for the device, so a level above 0 costs overlap.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.utils.collectives import all_gather_object, world_group
from megatron.core.utils.collectives import barrier as barrier_of

MAX_LEVEL = 2
OPTIONS = ("max", "minmax", "all")


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Timer:
    """One stopwatch that accumulates over start/stop pairs until it is reset.

    With `barrier` a call first waits for all ranks of the group, so that a slow neighbour is not counted.
    """

    def __init__(self, name: str, barrier_group: dist.ProcessGroup | None = None) -> None:
        self.name = name
        self._barrier_group = barrier_group
        self._elapsed = 0.0
        self._active_time = 0.0
        self._start_time = 0.0
        self.is_running = False

    def start(self, barrier: bool = False) -> None:
        """Begin to measure. Starting a running timer is an error."""
        assert not self.is_running, f"timer {self.name!r} is started twice without a stop"
        if barrier:
            barrier_of(self._barrier_group or world_group())
        _wait_for_device()
        self._start_time = time.perf_counter()
        self.is_running = True

    def stop(self, barrier: bool = False) -> None:
        """End the measurement and add it up."""
        assert self.is_running, f"timer {self.name!r} is stopped without a start"
        if barrier:
            barrier_of(self._barrier_group or world_group())
        _wait_for_device()
        seconds = time.perf_counter() - self._start_time
        self._elapsed += seconds
        self._active_time += seconds
        self.is_running = False

    def reset(self) -> None:
        """Set the interval to zero and stop; the lifetime total of `active_time` stays."""
        self._elapsed = 0.0
        self.is_running = False

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset; a running timer goes on afterwards."""
        was_running = self.is_running
        if was_running:
            self.stop(barrier=barrier)
        seconds = self._elapsed
        if reset:
            self.reset()
        if was_running:  # from where it was stopped: no second wait
            self._start_time, self.is_running = time.perf_counter(), True
        return seconds

    def active_time(self) -> float:
        """Seconds measured since the timer was made, resets included."""
        return self._active_time


class _SkippedTimer(Timer):
    """Stands in for a timer above the chosen level: measures nothing and costs nothing."""

    def start(self, barrier: bool = False) -> None:
        return

    def stop(self, barrier: bool = False) -> None:
        return

    def reset(self) -> None:
        return

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        raise RuntimeError("this timer is above the timing log level and has no time; raise --timing-log-level.")


class Timers:
    """The timers of one process. Calling it with a name returns that timer, made at the first call.

    Args:
        log_level: 0, 1 or 2; timers of a higher level are not measured.
        log_option: "max" (slowest rank), "minmax" (both ends) or "all" (every rank).
    """

    def __init__(self, log_level: int, log_option: str) -> None:
        if log_level not in range(MAX_LEVEL + 1):
            raise ValueError(
                f"timing_log_level={log_level}: must be between 0 and {MAX_LEVEL}; set --timing-log-level."
            )
        if log_option not in OPTIONS:
            raise ValueError(f"timing_log_option={log_option!r}: must be one of {OPTIONS}; set --timing-log-option.")
        self._log_level = log_level
        self._log_option = log_option
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}
        self._skipped = _SkippedTimer("skipped")

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer called `name`. Its level is fixed by the first call (default: the highest)."""
        if name in self._levels:
            known = self._levels[name]
            assert log_level in (None, known), f"timer {name!r} has level {known}, asked for with level {log_level}"
        else:
            level = MAX_LEVEL if log_level is None else log_level
            assert level in range(MAX_LEVEL + 1), f"timer {name!r}: level {level} is not between 0 and {MAX_LEVEL}"
            self._levels[name] = level
            if level <= self._log_level:
                self._timers[name] = Timer(name)
        return self._timers.get(name, self._skipped)

    def names(self) -> list[str]:
        """Names of the timers that are measured at this level, oldest first."""
        return list(self._timers)

    def log_string(self, names: Iterable[str] | None = None, normalizer: float = 1.0, reset: bool = True) -> str | None:
        """Milliseconds per name over all ranks as printable lines, or None if no rank measured anything.

        Host: one all-gather of a float per name; every rank must call it with the same names.
        """
        rows = self._gather(list(names) if names is not None else self.names(), normalizer, reset)
        lines = [f"    {name + ' ':.<48s}: {text}" for name, text in self._describe(rows) if text]
        if not lines:
            return None
        title = {"max": "max time across ranks", "minmax": "(min, max) time across ranks", "all": "times across ranks"}
        return "\n".join([f"{title[self._log_option]} (ms):", *lines])

    def write(
        self,
        names: Iterable[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Add the slowest rank's seconds per name to a TensorBoard-like writer; collective as `log_string`."""
        assert normalizer > 0, f"normalizer={normalizer}: must be above 0"
        if barrier:
            barrier_of(world_group())
        for name, seconds in self._gather(list(names), normalizer, reset):
            if writer is not None and any(seconds):
                writer.add_scalar(f"{name}-time", max(seconds), iteration)

    def _gather(self, names: Sequence[str], normalizer: float, reset: bool) -> list[tuple[str, list[float]]]:
        """Per name, the seconds of every rank divided by `normalizer`; 0 where a rank has no such timer."""
        local = [self._timers[n].elapsed(reset=reset) / normalizer if n in self._timers else 0.0 for n in names]
        if not names:
            return []
        by_rank = all_gather_object(local, world_group())
        return [(name, [times[i] for times in by_rank]) for i, name in enumerate(names)]

    def _describe(self, rows: list[tuple[str, list[float]]]) -> list[tuple[str, str]]:
        described = []
        for name, seconds in rows:
            milliseconds = [1000.0 * s for s in seconds if s > 0.0]
            if not milliseconds:
                text = ""
            elif self._log_option == "max":
                text = f"{max(milliseconds):.2f}"
            elif self._log_option == "minmax":
                text = f"({min(milliseconds):.2f}, {max(milliseconds):.2f})"
            else:
                text = " ".join(f"{rank}: {1000.0 * s:.2f}" for rank, s in enumerate(seconds))
            described.append((name, text))
        return described
