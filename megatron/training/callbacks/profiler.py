"""Profiles the steps between --profile-step-start and --profile-step-end on the chosen ranks.

With --use-pytorch-profiler a trace goes to the TensorBoard directory; without it the CUDA profiler is switched on and
off around the steps, for a run under Nsight Systems.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from megatron.core.utils.logging import get_rank
from megatron.training.callbacks.base import Callback
from megatron.training.train_state import StepResult, TrainingRun


class Profiler(Callback):
    """Starts before step `profile_step_start` + 1 and stops after step `profile_step_end`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.first, self.last = args.profile_step_start, args.profile_step_end
        self.trace_dir = Path(args.tensorboard_dir or ".") / "profile" if args.use_pytorch_profiler else None
        self.record_shapes = args.pytorch_profiler_collect_shapes
        self.with_stack = args.pytorch_profiler_collect_callstack
        self._active: Any = None

    def on_step_start(self, run: TrainingRun) -> None:
        if run.state.iteration != self.first:
            return
        if self.trace_dir is None:
            torch.cuda.cudart().cudaProfilerStart()
            return
        self._active = torch.profiler.profile(record_shapes=self.record_shapes, with_stack=self.with_stack)
        self._active.start()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.state.iteration == self.last:
            self._stop()

    def on_train_end(self, run: TrainingRun) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._active is None:
            return
        self._active.stop()
        self.trace_dir.mkdir(parents=True, exist_ok=True)
        self._active.export_chrome_trace(str(self.trace_dir / f"rank-{get_rank()}.json"))
        self._active = None


def is_profiled(args: argparse.Namespace) -> bool:
    """Whether this rank is to be profiled; an empty list of ranks means all."""
    return args.profile and (not args.profile_ranks or get_rank() in args.profile_ranks)
