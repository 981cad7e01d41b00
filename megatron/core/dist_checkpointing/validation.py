"""Compares what a model wants with what the files hold, before a byte is read, and lists every difference at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Wanted:
    """What some rank wants of one key."""

    global_shape: tuple[int, ...]
    num_needed_rows: int | None
    """see `ShardedTensor`"""


def wanted_keys(tensors: Iterable[ShardedTensor]) -> dict[str, Wanted]:
    """What a rank wants, by key."""
    return {tensor.key: Wanted(tensor.global_shape, tensor.num_needed_rows) for tensor in tensors}


def _fits(stored: tuple[int, ...], wanted: Wanted) -> bool:
    """Equal shapes; a tensor with filler may differ in its number of rows."""
    if wanted.num_needed_rows is None or not stored:
        return stored == wanted.global_shape
    return stored[0] >= wanted.num_needed_rows and stored[1:] == wanted.global_shape[1:]


def _shape_errors(wanted: Mapping[str, Wanted], metadata: Metadata) -> list[str]:
    errors = []
    for key, want in wanted.items():
        stored = metadata.state_dict_metadata.get(key)
        if stored is None:
            continue
        if not isinstance(stored, TensorStorageMetadata):
            errors.append(f"{key}: stored as bytes, the model has a tensor of {list(want.global_shape)}")
        elif not _fits(tuple(stored.size), want):
            errors.append(f"{key}: stored {list(stored.size)}, the model has {list(want.global_shape)}")
    return errors


def check_fit(
    wanted: Mapping[str, Wanted],
    metadata: Metadata,
    strictness: Strictness,
    ignored: re.Pattern[str] | None = None,
) -> None:
    """Refuse files that do not fit what all ranks together want, on every rank with the same text.

    Keys that `ignored` matches may be in the files without being asked for (a skipped optimizer, say).

    Raises: CheckpointError with all shape differences, and with missing or unexpected keys as `strictness` says.
    """
    stored = set(metadata.state_dict_metadata)
    missing = sorted(set(wanted) - stored)
    unexpected = sorted(key for key in stored - set(wanted) if not (ignored and ignored.fullmatch(key)))
    failures, notes = [], []
    if shapes := _shape_errors(wanted, metadata):
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
            "or leave parts out: --no-load-optim skips the optimizer, --finetune all but the weights; "
            "--dist-ckpt-strictness log_all goes on with the keys that both have"
        )
    if notes and strictness in (Strictness.LOG_ALL, Strictness.LOG_UNEXPECTED):
        get_logger(__name__).warning("checkpoint and model differ:\n%s", "\n".join(notes))
