"""Write a `.bin` file token by token and its `.idx` file at the end.

The index is written under a temporary name and renamed, after the tokens have reached the disk: a writer that is killed
leaves a `.bin` without an index, which readers refuse.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import (
    HEADER,
    MAGIC,
    VERSION,
    IndexReader,
    dtype_code,
    get_bin_path,
    get_idx_path,
)
from megatron.core.errors import DataError

MAX_SEQUENCE_TOKENS = 2**31 - 1


def sequence_pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return byte pointers int64[S]: the exclusive prefix sum of lengths [S] times the item size."""
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= itemsize
    return pointers


def write_index(idx_path: str, dtype: Any, lengths: np.ndarray, document_indices: np.ndarray) -> None:
    """Write an index atomically from lengths [S] and document borders [D]."""
    lengths = np.ascontiguousarray(lengths, dtype="<i4")
    borders = np.ascontiguousarray(document_indices, dtype="<i8")
    pointers = sequence_pointers(lengths, np.dtype(dtype).itemsize).astype("<i8", copy=False)
    temporary = f"{idx_path}.tmp.{os.getpid()}"
    with open(temporary, "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, dtype_code(dtype), len(lengths), len(borders)))
        for values in (lengths, pointers, borders):
            values.tofile(stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, idx_path)


class IndexedDatasetBuilder:
    """Collects sequences and documents, then writes the index with `finalize`.

    `add_document` stores a document of one or more sequences at once; `add_item` and `end_document` do it in steps.
    A document without tokens leaves a repeated border and no sequence.
    """

    def __init__(self, bin_path: str, dtype: Any = np.int32) -> None:
        dtype_code(dtype)
        self._bin_path = bin_path
        self._file = open(bin_path, "wb")  # noqa: SIM115 - closed by finalize
        self.dtype = np.dtype(dtype)
        self._limits = np.iinfo(self.dtype) if self.dtype.kind in "iu" else None
        self._lengths = array("i")
        self._borders = array("q", [0])

    def _write(self, tokens: Any) -> int:
        """Append tokens [n] to the file and return n."""
        values = np.asarray(tokens)
        if values.size and values.dtype != self.dtype and self._limits is not None:
            low, high = int(values.min()), int(values.max())
            if low < self._limits.min or high > self._limits.max:
                raise DataError(
                    f"token id {low if low < self._limits.min else high}: outside of {self.dtype.name}, the "
                    f"dtype of {self._bin_path}; write with a wider dtype."
                )
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        return values.size

    def _append_length(self, length: int) -> None:
        if length > MAX_SEQUENCE_TOKENS:
            raise DataError(f"sequence length={length}: an index holds at most {MAX_SEQUENCE_TOKENS}; split the text.")
        self._lengths.append(length)

    def add_item(self, tokens: Any) -> None:
        """Append one sequence, tokens [n], to the current document."""
        self._append_length(self._write(tokens))

    def end_document(self) -> None:
        """Close the current document."""
        self._borders.append(len(self._lengths))

    def add_document(self, tokens: Any, lengths: Sequence[int]) -> None:
        """Append a whole document: tokens [sum(lengths)], cut into sequences of the given lengths."""
        written = self._write(tokens)
        if written != sum(lengths):
            raise DataError(f"lengths={list(lengths)}: their sum is not the {written} tokens of the document; fix one.")
        for length in lengths:
            self._append_length(length)
        self.end_document()

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append whole documents of one sequence each: tokens [sum(lengths)], lengths int [D]; 0 leaves no sequence."""
        written, total = self._write(tokens), int(lengths.sum())
        if written != total:
            raise DataError(
                f"lengths of {len(lengths)} documents: their sum {total} is not the {written} tokens; fix one."
            )
        for length in lengths.tolist():
            if length:
                self._append_length(length)
            self.end_document()

    def add_index(self, path_prefix: str) -> None:
        """Append all documents of another pair of files, which must have the same dtype."""
        index = IndexReader(get_idx_path(path_prefix))
        if np.dtype(index.dtype) != self.dtype:
            raise DataError(
                f"data_path={path_prefix!r}: its tokens are {np.dtype(index.dtype).name}, the output has "
                f"{self.dtype.name}; files to be merged must come from one tokenizer."
            )
        bin_path = get_bin_path(path_prefix)
        size = os.path.getsize(bin_path) if os.path.isfile(bin_path) else None
        if size != index.num_bin_bytes:
            raise DataError(
                f"data_path={path_prefix!r}: {bin_path} has {size} bytes, its index asks for "
                f"{index.num_bin_bytes}; copy or write both again."
            )
        first_sequence = len(self._lengths)
        self._lengths.frombytes(index.sequence_lengths.astype(np.int32).tobytes())
        self._borders.frombytes((index.document_indices[1:] + first_sequence).astype(np.int64).tobytes())
        with open(bin_path, "rb") as stream:
            shutil.copyfileobj(stream, self._file, 1 << 22)

    def finalize(self, idx_path: str) -> None:
        """Close the token file and write the index."""
        if self._borders[-1] != len(self._lengths):
            raise DataError(
                f"{self._bin_path}: the last document was not ended; call end_document() before finalize()."
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_index(
            idx_path,
            self.dtype,
            np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32),
            np.frombuffer(self._borders, dtype=np.int64),
        )
