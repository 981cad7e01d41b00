"""Saves a run and continues it.

Save:  tensors and common state into iter_* (core/dist_checkpointing), then the tracker, then retention.
Load:  counters, scheduler and loss scale from the common state, tensors in place; generators last, once the data
       iterators exist, since building those may draw.
"""

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import PendingSave, Strictness
from megatron.core.errors import CheckpointError
from megatron.core.utils.collectives import MIN, all_reduce, broadcast_object, world_group
from megatron.core.utils.logging import get_logger, get_rank, get_world_size, log_single_rank
from megatron.training import checkpoint_paths as paths
from megatron.training import checkpoint_state as state
from megatron.training.progress_file import ProgressFile
from megatron.training.rng_state import restore_rng_state
from megatron.training.train_state import TrainingRun

logger = get_logger(__name__)


def on_first_rank(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and return its result on every rank; its CheckpointError is raised on every rank."""
    answer: list[Any] = [None, None]
    if get_rank() == 0:
        try:
            answer[0] = action()
        except (CheckpointError, OSError) as err:
            answer[1] = str(err)
    answer = broadcast_object(answer, world_group())
    if answer[1] is not None:
        raise CheckpointError(answer[1])
    return answer[0]


class CheckpointWriter:
    """Writes the checkpoints of one run into `--save`; at most one asynchronous save is under way."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Take the folder.

        Raises: CheckpointError on all ranks if it cannot be written or another run saves there.
        """
        self.root = Path(args.save)
        self.retain_interval = args.save_retain_interval
        self.is_async = args.async_save
        self.is_fully_parallel = args.ckpt_fully_parallel_save
        self._folder: paths.SaveFolder | None = None
        self._progress = ProgressFile(self.root) if args.log_progress else None
        self._pending: tuple[PendingSave, int, str] | None = None
        on_first_rank(self._take_folder)

    def _take_folder(self) -> None:
        self._folder = paths.SaveFolder(self.root)

    def note_start(self, run: TrainingRun) -> None:
        """Mark in progress.txt, if that is asked for, where this job starts."""
        if self._progress is not None:
            self._progress.append(self._progress.line("started job", run))

    def save(self, run: TrainingRun) -> None:
        """Save the state of `run`; returns once it is on the disk, or, asynchronously, once it is copied."""
        self.finish()
        iteration = run.state.iteration
        on_first_rank(lambda: paths.withdraw(self.root, iteration))
        folder = paths.checkpoint_folder(self.root, iteration)
        pending = PendingSave(
            folder,
            state.saved_tensors(run),
            state.common_state(run),
            asynchronous=self.is_async,
            fully_parallel=self.is_fully_parallel,
        )
        line = "" if self._progress is None else self._progress.line("saved checkpoint", run)
        self._pending = (pending, iteration, line)
        if not self.is_async:
            self.finish()

    def poll(self) -> None:
        """Complete an asynchronous save if every rank has written its part; one all-reduce while one is under way."""
        if self._pending is None:
            return
        written = torch.tensor([int(self._pending[0].is_written())])
        all_reduce(written, world_group(), op=MIN)
        if written.item():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if any, and point the tracker to it."""
        if self._pending is None:
            return
        (pending, iteration, line), self._pending = self._pending, None
        pending.commit()
        on_first_rank(lambda: self._publish(iteration, line))
        log_single_rank(
            logger, logging.INFO, f"successfully saved checkpoint from iteration {iteration} to {self.root}"
        )

    def _publish(self, iteration: int, line: str) -> None:
        paths.publish(self.root, iteration)
        if self._progress is not None:
            self._progress.append(line)
        paths.prune(self.root, self.retain_interval, iteration)

    def close(self) -> None:
        """Give the folder back; a save that was not finished is left incomplete."""
        if self._folder is not None:
            self._folder.release()


@dataclass(frozen=True)
class Source:
    """Where a run starts from."""

    folder: Path
    """a complete iter_* or release folder"""
    weights_only: bool
    """leave optimizer, generators, scheduler and counters at their start"""


def find_source(args: argparse.Namespace) -> Source | None:
    """The checkpoint that the flags name, or None for a fresh start. Reads the tracker on this rank.

    Raises: CheckpointError for a tracker that names no readable checkpoint, and for no checkpoint where
    --pretrained-checkpoint or --exit-on-missing-checkpoint ask for one.
    """
    for root, weights_only in ((args.load, args.finetune), (args.pretrained_checkpoint, True)):
        if root is None:
            continue
        folder = paths.folder_to_load(Path(root), args.ckpt_step, args.ckpt_fallback)
        if folder is not None:
            return Source(folder, weights_only or folder.name == "release")
    if args.pretrained_checkpoint is not None:
        raise CheckpointError(
            f"--pretrained-checkpoint {args.pretrained_checkpoint}: no checkpoint there; name a folder that holds one, "
            "or drop the flag to start from initial weights"
        )
    if args.load is not None and args.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"--load {args.load}: no checkpoint there; drop --exit-on-missing-checkpoint to start fresh"
        )
    return None


def load_checkpoint(run: TrainingRun) -> Callable[[], None]:
    """Load what the flags name into `run`. Returns the function that restores the generators, to be called last.

    Raises: CheckpointError listing what does not fit.
    """
    args = run.args
    source = on_first_rank(lambda: find_source(args))
    if source is None:
        if args.load is not None:
            text = f"--load {args.load}: no checkpoint there, the run starts from initial weights; "
            text += "--exit-on-missing-checkpoint refuses that"
            log_single_rank(logger, logging.WARNING, text)
        return lambda: None
    common = None if source.weights_only else on_first_rank(lambda: _load_common(source.folder))
    with_optimizer = common is not None and not args.no_load_optim
    rng = state.rng_tensors() if common is not None and _restores_rng(run, common) else {}
    tensors = state.model_tensors(run) + list(rng.values())
    if with_optimizer:
        tensors += state.optimizer_tensors(run)
    dist_checkpointing.load(
        source.folder,
        tensors,
        Strictness(args.dist_ckpt_strictness),
        ignored=state.ignored_keys(foreign=source.weights_only, optimizer=not with_optimizer),
        fully_parallel=args.ckpt_fully_parallel_load,
        verifies_checksums=args.verify_integrity,
    )
    if common is not None:
        state.restore_counters(run, common)
        run.scheduler.load_state_dict(common["scheduler"])
    if with_optimizer:
        run.optimizer.load_state_dict({**run.optimizer.state_dict(), "grad_scaler": common["grad_scaler"]})
    else:
        run.optimizer.reload_model_params()
    log_single_rank(logger, logging.INFO, f"loaded checkpoint {source.folder} at iteration {run.state.iteration}")
    return lambda: restore_rng_state({name: tensor.data for name, tensor in rng.items()}) if rng else None


def _load_common(folder: Path) -> dict[str, Any]:
    return dist_checkpointing.load_common(folder, state.COMMON_ENTRIES)


def _restores_rng(run: TrainingRun, common: dict[str, Any]) -> bool:
    """Whether the saved generator states belong to ranks like these."""
    if run.args.no_load_rng or common["args"]["no_save_rng"]:
        return False
    saved, here = (common["world_size"], common["device"]), (get_world_size(), run.device.type)
    if saved != here:
        text = f"generators start from --seed: saved by {saved[0]} ranks on {saved[1]}, here are {here[0]} on {here[1]}"
        log_single_rank(logger, logging.WARNING, text)
    return saved == here
