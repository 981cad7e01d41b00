"""Keep index arrays on disk between runs.

The key is the md5 of a description that names everything the arrays depend on; files are
`<md5>-<class>-<split>-<name>.npy` and `-description.txt`. They are written under a temporary name and renamed, the
description last, so that whoever sees the description sees complete arrays: builders on several nodes, or a builder
that is killed, do no harm. An entry is used if all files are there, the description is equal and the caller accepts
the arrays; all else is built again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

import numpy as np

from megatron.core.errors import DataError

Arrays = dict[str, np.ndarray]


def _write_atomically(path: str, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file so that its name appears only with its whole content."""
    temporary = f"{path}.tmp.{os.getpid()}.{os.urandom(4).hex()}"
    with open(temporary, "wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def description_hash(description: str) -> str:
    """Return the cache key of a description."""
    return hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class IndexCache:
    """The files of one dataset in a cache folder."""

    folder: str
    """Where the files are."""
    description: str
    """What the arrays depend on, as text."""
    stem: str
    """Class and split, the middle of each file name."""
    names: tuple[str, ...]
    """The arrays, in the order of writing."""

    def path(self, suffix: str) -> str:
        """Return the full name of one file, e.g. for `sample_index.npy`."""
        return os.path.join(self.folder, f"{description_hash(self.description)}-{self.stem}-{suffix}")

    def load(self) -> Arrays | None:
        """Return the arrays as memory maps, or None if the entry is incomplete, foreign or damaged.

        Raises: DataError if files that are there cannot be read.
        """
        try:
            with open(self.path("description.txt"), encoding="utf-8") as stream:
                if stream.read() != self.description:
                    return None
            return {name: np.load(self.path(f"{name}.npy"), mmap_mode="r", allow_pickle=False) for name in self.names}
        except (FileNotFoundError, ValueError, EOFError):
            # np.load reports a file that is too short for its header or its shape with the latter two.
            return None
        except OSError as error:
            raise DataError(
                f"data_cache_path={self.folder!r}: the index cache cannot be read ({error.strerror}); give a readable "
                "folder with --data-cache-path."
            ) from error

    def store(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the arrays, then the description.

        Raises: DataError if the folder cannot be written.
        """
        try:
            os.makedirs(self.folder, exist_ok=True)
            for name in self.names:
                array = arrays[name]
                _write_atomically(self.path(f"{name}.npy"), lambda stream, array=array: np.save(stream, array))
            _write_atomically(self.path("description.txt"), lambda stream: _write_text(stream, self.description))
        except OSError as error:
            raise DataError(
                f"data_cache_path={self.folder!r}: the index cache cannot be written ({error.strerror}); give a "
                "writable folder with --data-cache-path."
            ) from error


def _write_text(stream: IO[bytes], text: str) -> None:
    stream.write(text.encode())


def load_or_build(
    cache: IndexCache | None, build: Callable[[], Arrays], accept: Callable[[Arrays], bool]
) -> tuple[Arrays, bool]:
    """Return the arrays and whether they came from the cache; without a cache they are built in memory."""
    if cache is None:
        return build(), False
    cached = cache.load()
    if cached is not None and accept(cached):
        return cached, True
    cache.store(build())
    stored = cache.load()
    assert stored is not None, f"the index cache in {cache.folder} lost files that were just written"
    return stored, False
