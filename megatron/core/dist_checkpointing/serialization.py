"""Saves and loads lists of `ShardedTensor` in a folder of torch.distributed.checkpoint files.

A save has three phases, so that the slow one may run beside training:

    1. plan    all ranks, main thread: who writes which box (collectives); values are staged if the save is asynchronous
    2. write   each rank alone, main or background thread: `__{rank}_0.distcp`, written and fsynced
    3. commit  all ranks, main thread: the coordinator writes `.metadata`, `common.json`, then `metadata.json`

`metadata.json` is the last file: a folder without it is not a checkpoint. Everything that is no tensor is JSON in
`common.json`; nothing is pickled but the tensor list of `.metadata`, which `strategies.safe_metadata` opens guarded.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.durable import sync_folder, write_json
from megatron.core.dist_checkpointing.strategies.fully_parallel import assign_readers, exchange, place_of
from megatron.core.dist_checkpointing.strategies.planners import ShardedLoadPlanner, ShardedSavePlanner
from megatron.core.dist_checkpointing.strategies.safe_metadata import METADATA_FILE, SafeFileSystemReader
from megatron.core.dist_checkpointing.validation import Strictness, check_fit, wanted_keys
from megatron.core.errors import CheckpointError
from megatron.core.utils.collectives import all_gather_object, gather_object, scatter_object, world_group

T = TypeVar("T")

COMPLETE_FILE = "metadata.json"
COMMON_FILE = "common.json"
_COMPLETE = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "json",
    "common_backend_version": 1,
}


def is_complete(folder: Path) -> bool:
    """Whether a save into `folder` has been committed."""
    return (folder / COMPLETE_FILE).is_file() and (folder / METADATA_FILE).is_file()


def remove(folder: Path) -> None:
    """Delete a checkpoint, its completeness marker first: a crash half-way leaves no folder that looks whole."""
    (folder / COMPLETE_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _group_rank_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, on every rank."""
    return all_gather_object(value, group or world_group())


def _reason(error: BaseException, folder: Path) -> str:
    """Why a write failed: behind an error of torch about places in its archive stands that of the system."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    if found is None:
        return f"{type(error).__name__}: {error}"
    return f"{type(found).__name__}: {found} (free on this disk: {shutil.disk_usage(folder).free} bytes)"


def _raise_first(errors: Sequence[str | None], folder: Path) -> None:
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
    if failed:
        raise CheckpointError(f"{folder}: not saved, the checkpoints before it are untouched; " + "; ".join(failed))


class PendingSave:
    """A save between its plan and its commit. All ranks make it together and commit it together.

    Memory: an asynchronous save keeps a copy of the boxes this rank writes, on the CPU, until its commit.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[ShardedTensor],
        common: dict[str, Any],
        group: dist.ProcessGroup | None = None,
        asynchronous: bool = False,
        fully_parallel: bool = True,
    ) -> None:
        """Phase 1. `group` needs a CPU backend; None is the default group.

        Boxes that several ranks hold are spread over them, or, not `fully_parallel`, written by the lowest of them.

        Raises: CheckpointError if the folder cannot be made, or two ranks give different boxes of one key.
        """
        self.folder, self.common, self.group = folder, common, group
        self.rank, _ = _group_rank_size(group)
        self.error: str | None = None
        self.results: list[WriteResult] = []
        self._prepare_folder()
        self.writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        self.planner = ShardedSavePlanner(tensors, to_lowest_rank=not fully_parallel)
        self.planner.set_up_planner({}, is_coordinator=self.rank == 0)
        plan = self._share_plans(self.writer.prepare_local_plan(self.planner.create_local_plan()))
        self._keep_only(plan, stage=asynchronous)
        self._thread: threading.Thread | None = None
        if asynchronous:
            self._thread = threading.Thread(target=self._write, args=(plan,), name="checkpoint writer")
            self._thread.start()
        else:
            self._write(plan)

    def _prepare_folder(self) -> None:
        if self.rank == 0:
            try:
                if self.folder.exists():
                    remove(self.folder)
                self.folder.mkdir(parents=True)
                sync_folder(self.folder.parent)
            except OSError as err:
                self.error = str(err)
        _raise_first(_gather(self.error, self.group), self.folder)

    def _share_plans(self, local_plan: SavePlan) -> SavePlan:
        plans = gather_object(local_plan, self.group or world_group())
        error = None
        if self.rank == 0:
            try:
                plans, self.metadata = self.planner.create_global_plan(plans)
                plans = self.writer.prepare_global_plan(plans)
            except ValueError as err:
                error = str(err)
        _raise_first(_gather(error, self.group), self.folder)
        return self.planner.finish_plan(scatter_object(plans, self.group or world_group()))

    def _keep_only(self, plan: SavePlan, stage: bool) -> None:
        boxes = {item.index: self.planner.boxes[item.index] for item in plan.items}
        if stage:
            boxes = {index: replace(box, data=box.data.detach().to("cpu", copy=True)) for index, box in boxes.items()}
        self.planner.boxes = boxes

    def _write(self, plan: SavePlan) -> None:
        """Phase 2. Errors are kept: they are raised on all ranks together at the commit."""
        try:
            self.results = self.writer.write_data(plan, self.planner).wait()
        except (OSError, RuntimeError) as err:
            self.error = _reason(err, self.folder)

    def is_written(self) -> bool:
        """Whether this rank's bytes are on the disk (or have failed); never blocks."""
        return self._thread is None or not self._thread.is_alive()

    def commit(self) -> None:
        """Phase 3. Waits for this rank's writer, then for the others; afterwards the checkpoint is complete.

        Raises: CheckpointError on all ranks if one of them could not write.
        """
        if self._thread is not None:
            self._thread.join()
        _raise_first(_gather(self.error, self.group), self.folder)
        results = gather_object(self.results, self.group or world_group())
        if self.rank == 0:
            try:
                self.writer.finish(self.metadata, results)
                write_json(self.folder / COMMON_FILE, self.common)
                write_json(self.folder / COMPLETE_FILE, _COMPLETE)
            except OSError as err:
                self.error = f"{type(err).__name__}: {err}"
        _raise_first(_gather(self.error, self.group), self.folder)
        self.planner.boxes = {}


def save(
    folder: Path, tensors: Sequence[ShardedTensor], common: dict[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Save and wait. See `PendingSave` for the phases and errors."""
    PendingSave(folder, tensors, common, group).commit()


def load_common(folder: Path, required: Sequence[str] = ()) -> dict[str, Any]:
    """Everything of a checkpoint that is no tensor.

    Raises: CheckpointError if the folder is incomplete, comes from another program or lacks a `required` entry.
    """
    path = folder / COMMON_FILE
    if not is_complete(folder):
        raise CheckpointError(
            f"{folder}: {COMPLETE_FILE} is missing, so the save was cut short; load an earlier iteration"
        )
    if not path.is_file():
        foreign = "common.pt" if (folder / "common.pt").is_file() else "no " + COMMON_FILE
        raise CheckpointError(
            f"{folder}: {foreign}: arguments, scheduler and counters of another program are not read; "
            "load the weights alone with --finetune"
        )
    try:
        common = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(
            f"{path}: cannot be read ({err}); the file is damaged, load an earlier iteration"
        ) from err
    missing = [name for name in required if name not in common] if isinstance(common, dict) else ["an object"]
    if missing:
        raise CheckpointError(f"{path}: lacks {', '.join(missing)}; the file is damaged, load an earlier iteration")
    return common


def load(
    folder: Path,
    tensors: Sequence[ShardedTensor],
    strictness: Strictness = Strictness.RAISE_ALL,
    ignored: re.Pattern[str] | None = None,
    group: dist.ProcessGroup | None = None,
    fully_parallel: bool = False,
    verifies_checksums: bool = False,
) -> None:
    """Fill `tensors` in place from the files of any layout. All ranks load together.

    By itself each rank reads every stored box that it wants a part of. With `fully_parallel` each box is read by one
    rank, and the others get their parts from it (`strategies.fully_parallel`): the same values. torch does not compare
    the checksums in the files; with `verifies_checksums` that is done for all that is read.

    Raises: CheckpointError on all ranks, listing all differences or naming a damaged file.
    """
    reader = SafeFileSystemReader(folder, verifies_checksums)
    metadata = _together(reader.read_metadata, group)
    by_rank = _gather(wanted_keys(tensors), group)
    check_fit({key: want for keys in by_rank for key, want in keys.items()}, metadata, strictness, ignored)
    fitting = [tensor for tensor in tensors if tensor.key in metadata.state_dict_metadata]
    reader.set_up_storage_reader(metadata, is_coordinator=False)

    def read(boxes: Sequence[ShardedTensor]) -> None:
        _together(lambda: _read(reader, boxes, metadata), group)

    if fully_parallel:
        wanted = _gather([place_of(tensor) for tensor in fitting], group)
        exchange(assign_readers(wanted, metadata), fitting, read, group or world_group())
    else:
        read(fitting)


def _read(reader: SafeFileSystemReader, tensors: Sequence[ShardedTensor], metadata: Metadata) -> None:
    planner = ShardedLoadPlanner(tensors, metadata)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except CheckpointError:
        raise
    except (OSError, RuntimeError, EOFError, KeyError) as err:
        reason = str(err).split(". ")[0]  # torch goes on with a page of advice
        remedy = "load an earlier iteration with --ckpt-step"
        raise CheckpointError(f"{reader.path}: tensor data cannot be read ({reason}); {remedy}") from err


def _together(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `action` on every rank; where one raises CheckpointError all do, so that none waits for another."""
    result, error = None, None
    try:
        result = action()
    except CheckpointError as err:
        error = str(err)
    errors = _gather(error, group)
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]:
        raise CheckpointError(errors[0] if len(set(errors)) == 1 and errors[0] else "; ".join(failed))
    return cast(T, result)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Key -> global shape of every tensor in a checkpoint."""
    metadata = SafeFileSystemReader(folder).read_metadata()
    return {key: tuple(getattr(entry, "size", ())) for key, entry in metadata.state_dict_metadata.items()}
