"""How long to train, on batches of which size, and when to stop."""

import dataclasses
import signal
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob

LARGEST_SEED = 4_000_000_000
"""NumPy's generator takes 32 bits; the offsets of ranks are added to the seed."""

UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)


@dataclasses.dataclass(kw_only=True)
class TrainingConfig(ConfigTopic):
    """Training loop."""

    micro_batch_size: int | None = None
    """Samples that a rank works on at a time."""

    global_batch_size: int = knob(None)
    """Samples of an optimizer step over all ranks; unset: one microbatch per rank."""

    rampup_batch_size: list[int] | None = knob(None, nargs=3)
    """Start size, increment and samples of a ramp that ends at the global batch size."""

    step_batch_size_schedule: str | None = None
    """Batch size by consumed tokens, as `0:4 24K:8`; excludes a global batch size."""

    train_iters: int | None = None
    """Optimizer steps over all runs."""

    train_samples: int | None = None
    """Samples over all runs, instead of --train-iters."""

    iterations_to_skip: list[int] = knob([])
    """Iterations, counted from 1, whose data is consumed without a step."""

    exit_interval: int | None = None
    """Leave after an iteration that is a multiple of this."""

    exit_duration_in_mins: int | None = None
    """Leave after this many minutes."""

    exit_signal_handler: bool = False
    """Leave in order when the exit signal arrives."""

    exit_signal: int = int(signal.SIGTERM)
    """Number of the signal that the handler waits for."""

    seed: int = 1234
    """Base of all random generators."""

    data_parallel_random_init: bool = False
    """Add ten times the data-parallel rank to the seed."""

    eval_iters: int = 100
    """Batches of one evaluation."""

    eval_interval: int | None = None
    """Steps between evaluations; unset: none."""

    eval_micro_batch_size: int = knob(None)
    """Micro batch size of evaluations; unset: that of training."""

    eval_global_batch_size: int = knob(None)
    """Global batch size of evaluations; unset: that of training."""

    full_validation: bool = False
    """Evaluate the whole validation set each time, sample by sample; --eval-iters then counts for the test set only,
    and 0 still means no evaluation."""

    multiple_validation_sets: bool = False
    """Report each validation prefix by itself."""

    skip_train: bool = False
    """Only evaluate."""

    disable_bf16_reduced_precision_matmul: bool = False
    """Forbid bf16 partial sums in matrix products."""

    manual_gc: bool = False
    """Collect Python's garbage only at fixed steps, on all ranks together."""

    manual_gc_interval: int = 0
    """Steps between collections; 0: never."""

    manual_gc_eval: bool = knob(True, flag="--no-manual-gc-eval --disable-manual-gc-eval")
    """Collect around evaluations; the flag does not."""

    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """Return unused memory to the device once or twice per step."""

    def check(self) -> list[Violation]:
        """A length, in one unit, and positive sizes."""
        found = []
        if self.train_iters is not None and self.train_samples is not None:
            remedy = "keep one of --train-iters and --train-samples"
            found.append(violation(self, "train_iters train_samples", "a run has one length", remedy))
        elif self.train_iters is None and self.train_samples is None and not self.skip_train:
            remedy = "set --train-iters or --train-samples"
            found.append(violation(self, "train_iters train_samples", "a run needs a length", remedy))
        positive = ("micro_batch_size", "global_batch_size", "train_iters", "train_samples", "eval_interval")
        for name in (*positive, "eval_micro_batch_size", "eval_global_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(violation(self, name, "at least 1", f"raise --{name.replace('_', '-')}"))
        if self.micro_batch_size is None:
            found.append(violation(self, "micro_batch_size", "a batch has a size", "set --micro-batch-size"))
        if self.manual_gc_interval < 0:
            remedy = "set --manual-gc-interval to 0 or more"
            found.append(violation(self, "manual_gc_interval", "a number of steps", remedy))
        if not 1 <= self.seed <= LARGEST_SEED:
            found.append(violation(self, "seed", f"from 1 to {LARGEST_SEED}", "set --seed to such a number"))
        return found + self._check_steps() + self._check_exit_signal()

    def _check_steps(self) -> list[Violation]:
        """Counts of steps, batches and minutes can happen."""
        found = []
        for name, least in (("exit_interval", 1), ("exit_duration_in_mins", 0), ("eval_iters", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                remedy = f"raise --{name.replace('_', '-')} or drop it"
                found.append(violation(self, name, f"at least {least}", remedy))
        if any(iteration < 1 for iteration in self.iterations_to_skip):
            remedy = "give --iterations-to-skip numbers from 1 on"
            found.append(violation(self, "iterations_to_skip", "iterations are counted from 1", remedy))
        return found

    def _check_exit_signal(self) -> list[Violation]:
        remedy = f"set --exit-signal to a number such as {int(signal.SIGTERM)}"
        if self.exit_signal not in {int(number) for number in signal.Signals}:
            return [violation(self, "exit_signal", "no signal of this system", remedy)]
        if self.exit_signal_handler and self.exit_signal in UNCATCHABLE:
            return [violation(self, "exit_signal", "no process can handle this signal", remedy)]
        return []
