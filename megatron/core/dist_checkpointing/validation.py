"""Compares what a model wants with what the files hold, before a byte is read, and lists every difference at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.errors import CheckpointError
from megatron.core.utils.logging import get_logger

_SHOWN = 20


class Strictness(Enum):
    """What keys that only one side has lead to; the names are those of `--dist-ckpt-strictness`."""

    RAISE_ALL = "raise_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    LOG_ALL = "log_all"
    LOG_UNEXPECTED = "log_unexpected"
    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    IGNORE_ALL = "ignore_all"


_RAISES_ON_MISSING = {Strictness.RAISE_ALL, Strictness.RAISE_UNEXPECTED, Strictness.ASSUME_OK_UNEXPECTED}


def _listing(title: str, lines: Sequence[str]) -> str:
    shown = "\n".join(f"    {line}" for line in lines[:_SHOWN])
    more = f"\n    ... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"  {title} ({len(lines)}):\n{shown}{more}"


def _fits(stored: tuple[int, ...], tensor: ShardedTensor) -> bool:
    """Equal shapes; a tensor with filler may differ in its number of rows."""
    if tensor.num_needed_rows is None or not stored:
        return stored == tensor.global_shape
    return stored[0] >= tensor.num_needed_rows and stored[1:] == tensor.global_shape[1:]


def _shape_errors(tensors: Iterable[ShardedTensor], metadata: Metadata) -> list[str]:
    errors = []
    for tensor in {t.key: t for t in tensors}.values():
        stored = metadata.state_dict_metadata.get(tensor.key)
        if stored is None:
            continue
        if not isinstance(stored, TensorStorageMetadata):
            errors.append(f"{tensor.key}: stored as bytes, the model has a tensor of {list(tensor.global_shape)}")
        elif not _fits(tuple(stored.size), tensor):
            errors.append(f"{tensor.key}: stored {list(stored.size)}, the model has {list(tensor.global_shape)}")
    return errors


def check_fit(
    tensors: Sequence[ShardedTensor],
    metadata: Metadata,
    strictness: Strictness,
    wanted_anywhere: set[str],
    ignored: re.Pattern[str] | None = None,
) -> list[ShardedTensor]:
    """Return the tensors to read; refuse files that do not fit.

    `wanted_anywhere` holds the keys of all ranks: a key of another pipeline stage is not unexpected. Keys that
    `ignored` matches may be in the files without being asked for (a skipped optimizer, say).

    Raises: CheckpointError with all shape differences, and with missing or unexpected keys as `strictness` says.
    """
    stored = set(metadata.state_dict_metadata)
    missing = sorted({tensor.key for tensor in tensors} - stored)
    unexpected = sorted(key for key in stored - wanted_anywhere if not (ignored and ignored.fullmatch(key)))
    failures, notes = [], []
    if shapes := _shape_errors(tensors, metadata):
        failures.append(_listing("different shapes", shapes))
    if missing:
        target = failures if strictness in _RAISES_ON_MISSING else notes
        target.append(_listing("not in the checkpoint", missing))
    if unexpected:
        target = failures if strictness in (Strictness.RAISE_ALL, Strictness.RAISE_UNEXPECTED) else notes
        target.append(_listing("in the checkpoint, not in the model", unexpected))
    if failures:
        raise CheckpointError(
            "the checkpoint does not fit this model:\n"
            + "\n".join(failures)
            + "\n  use the flags the run was saved with (--use-checkpoint-args takes them from the checkpoint), "
            "or leave parts out: --no-load-optim skips the optimizer, --finetune all but the weights"
        )
    if notes and strictness in (Strictness.LOG_ALL, Strictness.LOG_UNEXPECTED):
        get_logger(__name__).warning("checkpoint and model differ:\n%s", "\n".join(notes))
    return [tensor for tensor in tensors if tensor.key in stored]
