"""Writes that survive a crash at any point: a name appears only when its bytes are on the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one, after a crash as well."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a JSON value; sorted keys, so that equal states give equal bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")
