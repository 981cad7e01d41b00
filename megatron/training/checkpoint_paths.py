"""Names and life of the checkpoint folders: tracker, completeness, retention, and one writer per folder.

<save>/latest_checkpointed_iteration.txt   decimal iteration (or `release`), replaced last, in one step
<save>/iter_0000200/                       complete once it holds metadata.json
<save>/writer.lock                         held by rank 0 of the run that saves here
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path
from typing import TextIO

from megatron.core.dist_checkpointing import is_complete, remove
from megatron.core.dist_checkpointing.strategies.durable import sync_folder, write_text
from megatron.core.errors import CheckpointError
from megatron.core.utils.logging import get_logger

TRACKER_FILE = "latest_checkpointed_iteration.txt"
LOCK_FILE = "writer.lock"
_FOLDER = re.compile(r"iter_(\d{7,})")


def checkpoint_folder(root: Path, iteration: int) -> Path:
    """Folder of an iteration."""
    return root / f"iter_{iteration:07d}"


def read_tracker(root: Path) -> int | str | None:
    """Iteration the tracker names, the word `release`, or None without a tracker.

    Raises: CheckpointError if the tracker holds anything else or cannot be read.
    """
    path = root / TRACKER_FILE
    try:
        word = path.read_text(encoding="utf-8", errors="backslashreplace").strip()
    except FileNotFoundError:
        return None
    except OSError as err:
        raise CheckpointError(f"{path}: cannot be read ({err.strerror}); name a folder of checkpoints") from err
    if word == "release":
        return word
    if not (word.isascii() and word.isdecimal()):
        raise CheckpointError(
            f"{path}: holds {word!r}, not an iteration; write the number of a complete iter_* folder into it"
        )
    return int(word)


def complete_iterations(root: Path) -> list[int]:
    """Iterations with a complete checkpoint, ascending."""
    if not root.is_dir():
        return []
    found = [(match, child) for child in root.iterdir() if (match := _FOLDER.fullmatch(child.name))]
    return sorted(int(match.group(1)) for match, child in found if is_complete(child))


def folder_to_load(root: Path, step: int | None = None, fallback: bool = False) -> Path | None:
    """Folder that a run with `--load root` starts from, or None for an empty root.

    `step` overrides the tracker; `fallback` takes the newest complete checkpoint if the tracker's is incomplete.

    Raises: CheckpointError if the folder the tracker (or `step`) names is missing or incomplete.
    """
    named = step if step is not None else read_tracker(root)
    if named is None:
        if (done := complete_iterations(root)) and fallback:
            return checkpoint_folder(root, done[-1])
        return None
    folder = root / "release" if named == "release" else checkpoint_folder(root, int(named))
    if is_complete(folder):
        return folder
    if (folder / "mp_rank_00").exists() or list(folder.glob("mp_rank_*")):
        raise CheckpointError(
            f"{folder}: a checkpoint in the legacy `torch` format is not read; convert it to torch_dist first"
        )
    done = complete_iterations(root)
    if fallback and done:
        get_logger(__name__).warning("%s is incomplete, loading iteration %d instead", folder, done[-1])
        return checkpoint_folder(root, done[-1])
    have = ", ".join(map(str, done)) or "none"
    raise CheckpointError(
        f"{folder}: missing or incomplete; complete iterations here: {have}; choose one with --ckpt-step "
        "(--ckpt-fallback takes the newest)"
    )


def withdraw(root: Path, iteration: int) -> None:
    """Make an iteration free to be written again: the tracker first steps back to the newest other complete one."""
    if read_tracker(root) != iteration:
        return
    others = [done for done in complete_iterations(root) if done != iteration]
    if others:
        write_text(root / TRACKER_FILE, f"{others[-1]}\n")
    else:
        (root / TRACKER_FILE).unlink()
        sync_folder(root)


def publish(root: Path, iteration: int) -> None:
    """Point the tracker to an iteration.

    Raises: CheckpointError if its folder is not complete: the tracker never names an unreadable checkpoint.
    """
    folder = checkpoint_folder(root, iteration)
    if not is_complete(folder):
        raise CheckpointError(f"{folder}: not complete, the tracker stays at {read_tracker(root)}")
    write_text(root / TRACKER_FILE, f"{iteration}\n")


def prune(root: Path, retain_interval: int | None, newest: int) -> list[int]:
    """Remove complete checkpoints before `newest` that are no multiple of `retain_interval`; None keeps all."""
    if retain_interval is None:
        return []
    gone = [i for i in complete_iterations(root) if i < newest and i % retain_interval]
    for iteration in gone:
        remove(checkpoint_folder(root, iteration))
    return gone


class SaveFolder:
    """The folder of `--save`, owned by this run until `release`. Made on rank 0 only."""

    def __init__(self, root: Path) -> None:
        """Create the folder, prove that it can be written, and lock it.

        Raises: CheckpointError if it cannot be written, or another live run saves here.
        """
        self.root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock = (root / LOCK_FILE).open("a+", encoding="utf-8")
            self._take(self._lock)
        except OSError as err:
            raise CheckpointError(f"--save {root}: cannot be written ({err.strerror}); choose another folder") from err

    def _take(self, lock: TextIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise CheckpointError(
                f"--save {self.root}: another run saves here ({owner}); two runs would overwrite each other, "
                "choose another folder or end that run"
            ) from err
        lock.truncate(0)
        lock.write(f"host {socket.gethostname()}, process {os.getpid()}\n")
        lock.flush()

    def release(self) -> None:
        """Let others save here."""
        self._lock.close()
