"""Runs a function in a forked child and kills it at the n-th write, fsync, rename or removal.

`boundaries(body)` counts them; `run_until(body, n)` dies just before boundary n as a killed process does: no cleanup,
no flush of what Python still buffers. The child's files are proxies that flush, so that each `write` reaches the file.
"""

from __future__ import annotations

import io
import os
import pathlib
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

KILLED = 137


class _Counter:
    def __init__(self, die_at: int | None) -> None:
        self.seen, self.die_at = 0, die_at

    def tick(self) -> None:
        self.seen += 1
        if self.seen == self.die_at:
            os._exit(KILLED)


class _Stream:
    """A writable file whose every write is a boundary; everything else is passed on."""

    def __init__(self, stream: Any, counter: _Counter) -> None:
        self._stream, self._counter = stream, counter

    def write(self, data: Any) -> int:
        self._counter.tick()
        written = self._stream.write(data)
        self._stream.flush()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close()


def _patched(counter: _Counter) -> list[Any]:
    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counter.tick()
            return function(*args, **kwargs)

        return call

    real_open = io.open

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        stream = real_open(file, mode, *args, **kwargs)
        return _Stream(stream, counter) if set(mode) & set("wa+x") else stream

    names = ["fsync", "rename", "replace", "unlink", "mkdir", "rmdir"]
    patches = [mock.patch.object(os, name, counted(getattr(os, name))) for name in names]
    return [*patches, mock.patch.object(io, "open", open_), mock.patch.object(pathlib.Path, "open", _path_open(open_))]


def _path_open(open_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda path, mode="r", *args, **kwargs: open_(str(path), mode, *args, **kwargs)


def run_until(body: Callable[[], None], die_at: int | None) -> tuple[int, int]:
    """Fork, run `body`, die before boundary `die_at` (None: never). Return (exit status, boundaries seen)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        counter = _Counter(die_at)
        status = 1
        try:
            for patch in _patched(counter):
                patch.start()
            body()
            status = 0
        except Exception:  # noqa: BLE001  the child must never return into the test runner
            traceback.print_exc()
        finally:
            os.write(write, str(counter.seen).encode())
            os._exit(status)
    os.close(write)
    _, status = os.waitpid(child, 0)
    seen = int(os.read(read, 32) or b"0")
    os.close(read)
    return os.waitstatus_to_exitcode(status), seen


def boundaries(body: Callable[[], None]) -> int:
    """How many boundaries an undisturbed run of `body` has."""
    status, seen = run_until(body, None)
    assert status == 0, f"the undisturbed run ended with status {status}"
    return seen
