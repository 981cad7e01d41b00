"""How many microbatches make up the next step: constant, ramped up, or by a schedule of tokens.

Everything follows from the samples consumed so far, never from the iteration, so that a resumed run gets the same
sizes. A global batch must be a multiple of micro_batch_size * data_parallel_size at every point of a ramp or schedule;
this is checked when the calculator is built.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from megatron.core.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


class BatchSizeLaw(Protocol):
    """Global batch size as a function of the samples consumed so far."""

    def batch_size(self, consumed_samples: int) -> int:
        """Size of the batch that follows `consumed_samples`."""
        ...

    def all_batch_sizes(self) -> list[int]:
        """Every size the law can give."""
        ...


@dataclass(frozen=True)
class ConstantBatchSize:
    """The same size for ever."""

    global_batch_size: int

    def batch_size(self, consumed_samples: int) -> int:
        """The one size."""
        return self.global_batch_size

    def all_batch_sizes(self) -> list[int]:
        """The one size."""
        return [self.global_batch_size]


@dataclass(frozen=True)
class RampupBatchSize:
    """Rise from `start` to `global_batch_size` in steps of `increment`, spread evenly over `ramp_samples`.

    With n = (global_batch_size - start) / increment the size is start + increment * floor(consumed / (ramp / n))
    up to and including `ramp_samples`, and global_batch_size beyond.
    """

    start: int
    increment: int
    ramp_samples: int
    global_batch_size: int

    def __post_init__(self) -> None:
        given = f"rampup_batch_size=[{self.start}, {self.increment}, {self.ramp_samples}]"
        if self.start < 1 or self.increment < 1 or self.ramp_samples < 0:
            raise ConfigError(
                f"{given}: start and increment must be at least 1, the number of samples at least 0; "
                "correct --rampup-batch-size."
            )
        span = self.global_batch_size - self.start
        if span < 0 or span % self.increment:
            raise ConfigError(
                f"{given} with global_batch_size={self.global_batch_size}: the difference {span} must be a multiple "
                f"of the increment {self.increment} and not negative; change one of the three."
            )

    def batch_size(self, consumed_samples: int) -> int:
        """Size at this point of the ramp."""
        steps = (self.global_batch_size - self.start) // self.increment
        if consumed_samples > self.ramp_samples or steps == 0 or self.ramp_samples == 0:
            return self.global_batch_size
        # floor(consumed / (ramp / steps)) in integers: no rounding at a border.
        return self.start + self.increment * (consumed_samples * steps // self.ramp_samples)

    def all_batch_sizes(self) -> list[int]:
        """start, start + increment, ..., global_batch_size."""
        return list(range(self.start, self.global_batch_size + 1, self.increment))


@dataclass(frozen=True)
class StepBatchSize:
    """Piecewise constant: `steps` is [(consumed samples at which it begins, batch size), ...]."""

    steps: tuple[tuple[int, int], ...]

    def batch_size(self, consumed_samples: int) -> int:
        """Size of the last step that has begun."""
        return [size for begin, size in self.steps if begin <= consumed_samples][-1]

    def all_batch_sizes(self) -> list[int]:
        """The sizes of all steps."""
        return [size for _, size in self.steps]


def _parse_count(text: str, schedule: str) -> int:
    """An integer with an optional unit K, M or B (powers of 1000)."""
    match = re.fullmatch(r"(\d+)([KMB]?)", text.strip().upper())
    if match is None:
        raise ConfigError(
            f"step_batch_size_schedule={schedule!r}: {text!r} is no count; write an integer, optionally with K, M or B."
        )
    return int(match[1]) * _UNITS[match[2]]


def parse_step_batch_size_schedule(schedule: str, seq_length: int) -> StepBatchSize:
    """Read "0:4 24:8": thresholds in tokens, each with the batch size (in samples) from there on.

    The first threshold is 0, thresholds rise, and each one is reached by whole batches of the step before it.
    """
    name = f"step_batch_size_schedule={schedule!r}"
    steps: list[tuple[int, int]] = []
    for entry in schedule.replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise ConfigError(f"{name}: {entry!r} is no 'threshold:batch' pair; write for instance '0:4 24K:8'.")
        tokens, batch = _parse_count(threshold, schedule), _parse_count(size, schedule)
        if batch < 1:
            raise ConfigError(f"{name}: batch size {batch} must be at least 1; correct entry {entry!r}.")
        if tokens % seq_length:
            raise ConfigError(
                f"{name} with seq_length={seq_length}: threshold {tokens} tokens is no whole number of samples; "
                f"use a multiple of {seq_length}."
            )
        samples = tokens // seq_length
        if not steps and samples != 0:
            raise ConfigError(f"{name}: the first threshold is {tokens}, it must be 0; begin with '0:batch'.")
        if steps:
            begin, previous = steps[-1]
            if samples <= begin:
                raise ConfigError(f"{name}: threshold {tokens} does not rise above {begin * seq_length}; sort them.")
            if (samples - begin) % previous:
                raise ConfigError(
                    f"{name}: threshold {tokens} tokens comes {samples - begin} samples after the one before, which "
                    f"is no multiple of that step's batch size {previous}; move it to a whole batch."
                )
        steps.append((samples, batch))
    if not steps:
        raise ConfigError(f"{name}: is empty; write for instance '0:4 24K:8' or drop it.")
    return StepBatchSize(tuple(steps))


class NumMicroBatchesCalculator:
    """The current batch sizes of one process."""

    def __init__(self, law: BatchSizeLaw, micro_batch_size: int, data_parallel_size: int) -> None:
        samples_per_microbatch = micro_batch_size * data_parallel_size
        if micro_batch_size < 1 or data_parallel_size < 1:
            raise ConfigError(
                f"micro_batch_size={micro_batch_size} with data_parallel_size={data_parallel_size}: both must be at "
                "least 1; set --micro-batch-size."
            )
        for size in law.all_batch_sizes():
            if size < 1 or size % samples_per_microbatch:
                raise ConfigError(
                    f"global_batch_size={size}: must be a positive multiple of micro_batch_size {micro_batch_size} * "
                    f"data_parallel_size {data_parallel_size} = {samples_per_microbatch}; change --global-batch-size "
                    "(or its ramp or schedule) or --micro-batch-size."
                )
        self.law = law
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.current_global_batch_size = 0
        self.num_micro_batches = 0
        self.update(0)

    def update(self, consumed_samples: int) -> bool:
        """Set the sizes of the batch that follows `consumed_samples`; True if they changed."""
        before = self.current_global_batch_size
        self.current_global_batch_size = self.law.batch_size(consumed_samples)
        self.num_micro_batches = self.current_global_batch_size // (self.micro_batch_size * self.data_parallel_size)
        return self.current_global_batch_size != before


_CALCULATOR: NumMicroBatchesCalculator | None = None


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    *,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Build the calculator of this process; `rank` is upstream's argument for logging and has no effect here."""
    if _CALCULATOR is not None:
        raise RuntimeError("num_microbatches_calculator exists already; use reconfigure_num_microbatches_calculator.")
    reconfigure_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        step_batch_size_schedule=step_batch_size_schedule,
        seq_length=seq_length,
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    *,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Replace the calculator of this process; it begins at 0 consumed samples."""
    global _CALCULATOR
    del rank
    law = build_batch_size_law(rampup_batch_size, global_batch_size, step_batch_size_schedule, seq_length)
    _CALCULATOR = NumMicroBatchesCalculator(law, micro_batch_size, data_parallel_size)


def build_batch_size_law(
    rampup_batch_size: list[int] | None,
    global_batch_size: int | None,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> BatchSizeLaw:
    """Choose the law from the options a user gave; contradicting ones are refused."""
    if step_batch_size_schedule is not None:
        if global_batch_size is not None or rampup_batch_size is not None:
            raise ConfigError(
                f"step_batch_size_schedule={step_batch_size_schedule!r} with global_batch_size={global_batch_size}, "
                f"rampup_batch_size={rampup_batch_size}: the schedule gives all sizes; drop the other options."
            )
        if seq_length is None:
            raise ConfigError(
                f"step_batch_size_schedule={step_batch_size_schedule!r} with seq_length=None: thresholds are tokens; "
                "set --seq-length."
            )
        return parse_step_batch_size_schedule(step_batch_size_schedule, seq_length)
    if global_batch_size is None:
        raise ConfigError("global_batch_size=None: must be known; set --global-batch-size.")
    if rampup_batch_size is None:
        return ConstantBatchSize(global_batch_size)
    if len(rampup_batch_size) != 3:
        raise ConfigError(
            f"rampup_batch_size={rampup_batch_size}: takes three integers: start, increment, samples; give all three."
        )
    start, increment, ramp_samples = (int(value) for value in rampup_batch_size)
    return RampupBatchSize(start, increment, ramp_samples, global_batch_size)


def reset() -> None:
    """Forget the calculator."""
    global _CALCULATOR
    _CALCULATOR = None


destroy_num_microbatches_calculator = reset


def _calculator() -> NumMicroBatchesCalculator:
    if _CALCULATOR is None:
        raise RuntimeError("no num_microbatches_calculator; call init_num_microbatches_calculator first.")
    return _CALCULATOR


def get_num_microbatches() -> int:
    """Microbatches of the current step on each rank."""
    return _calculator().num_micro_batches


def get_current_global_batch_size() -> int:
    """Samples of the current step over all ranks."""
    return _calculator().current_global_batch_size


def get_micro_batch_size() -> int:
    """Samples of one microbatch on one rank."""
    return _calculator().micro_batch_size


def update_num_microbatches(consumed_samples: int) -> bool:
    """Move to the step that follows `consumed_samples`; True if the batch size changed."""
    return _calculator().update(consumed_samples)
