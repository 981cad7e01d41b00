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
    counters: Counter[str] = field(default_factory=Counter)
    """What happened how often; printed at exit, so that a feature that never acted is seen."""
    exit_reason: str | None = None
    """Set by a callback to end the loop after the current step; the text is logged."""
