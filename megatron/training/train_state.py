"""The counters of a run and the object that holds its parts; callbacks and the loop share both.

`TrainingRun` is passed explicitly. Nothing in it is global, so two runs can live in one process one after the other.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.process_groups_config import ProcessGroupCollection

if TYPE_CHECKING:
    from megatron.training.callbacks.base import CallbackList
    from megatron.training.guarded_steps import GuardedSteps


@dataclass
class TrainState:
    """What grows while a run goes on. A checkpoint stores exactly these numbers."""

    iteration: int = 0
    """Steps that have ended, skipped ones included."""
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    """Samples of iterations named by --iterations-to-skip."""
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: float = 0.0


@dataclass
class StepResult:
    """What one training step reports; equal on all ranks."""

    losses: dict[str, float]
    """Token-weighted mean per loss key over the whole batch; empty for a skipped step."""
    is_skipped: bool = False
    """The optimizer saw inf or nan under a loss scale and left the weights alone."""
    grad_norm: float | None = None
    num_zeros_in_grad: float | None = None
    num_microbatches: int = 1
    batch_size: int = 0
    num_overflows: int = 0
    """How often the step was repeated because a rank had more rows than its budget."""
    row_load: float | None = None
    """Rows of the fullest rank in any layer, relative to a balanced routing; None without a row budget."""
    router_sums: list[float] | None = None
    """What `MoEMetrics.reduce` gave at the end of the step; None if nobody has asked yet."""


class PutOff:
    """What callbacks leave to be done while the device is at work."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Do `call` later."""
        self._calls.append(call)

    def do(self) -> None:
        """Do all that was added, in order."""
        calls, self._calls = self._calls, []
        for call in calls:
            call()


@dataclass
class TrainingRun:
    """All parts of a run. `set_up` in training.py fills it; callbacks read it and may set `exit_reason`."""

    args: argparse.Namespace
    model: list[torch.nn.Module]
    """One entry per model chunk on this rank, wrapped for data parallelism."""
    optimizer: Any
    scheduler: Any
    model_config: Any
    pg_collection: ProcessGroupCollection
    device: torch.device
    forward_step_func: Callable[..., Any]
    train_iterator: Iterator[Any] | None = None
    valid_iterator: Iterator[Any] | None = None
    test_iterator: Iterator[Any] | None = None
    state: TrainState = field(default_factory=TrainState)
    callbacks: "CallbackList | None" = None
    guarded_steps: "GuardedSteps | None" = None
    """Runs the steps that read nothing before their end: captured ones, and those under a row budget."""
    counters: Counter[str] = field(default_factory=Counter)
    """What happened how often; printed at exit, so that a feature that never acted is seen."""
    hidden_share: float | None = None
    """Share of the last step's expert communication that was hidden; None if it was not measured."""
    put_off: PutOff = field(default_factory=PutOff)
    """Guarded steps do it as soon as the device has the next step; no later than that, so `state` is still the same."""
    exit_reason: str | None = None
    """Set by a callback to end the loop after the current step; the text is logged."""
