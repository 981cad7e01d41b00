"""Finds bytes that changed after they were written.

Each box in a `.distcp` file is a zip archive made by `torch.save`, which notes a CRC-32 of every record in it. torch
does not compare them when it reads; here they are.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata


def damage_in(archive: bytes) -> str | None:
    """What is wrong with one stored box, None if every record has the checksum it was written with."""
    try:
        with zipfile.ZipFile(BytesIO(archive)) as opened:
            record = opened.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, ValueError) as err:
        return str(err)
    return None if record is None else f"the checksum of {record} does not match"


def damaged_boxes(folder: Path, metadata: Metadata) -> Iterator[str]:
    """Read all tensor files of a checkpoint; yields a line for each box that is damaged or missing."""
    by_file = sorted(metadata.storage_data.items(), key=lambda item: (item[1].relative_path, item[1].offset))
    for index, info in by_file:
        path = folder / info.relative_path
        try:
            with path.open("rb") as stream:
                stream.seek(info.offset)
                problem = damage_in(stream.read(info.length))
        except OSError as err:
            problem = str(err)
        if problem is not None:
            yield f"{info.relative_path}, byte {info.offset}: {index.fqn} at {list(index.offset or ())}: {problem}"
