"""Read token sequences from a `.bin` file through its `.idx` file.

The index holds, little-endian and without padding: 9 magic bytes, u64 version, u8 dtype code, u64 number of sequences
S, u64 length D of the document index (documents + 1), then int32[S] lengths in tokens, int64[S] byte pointers into the
`.bin`, int64[D] document borders in sequence numbers, and for multimodal data int8[S] modes, which are not read here.
The `.bin` holds nothing but the tokens. Every fault that a size or a header can show is found when the file is opened.
"""

from __future__ import annotations

import os
import struct
from typing import Any, Protocol

import numpy as np
import torch

from megatron.core.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPE_CODES: dict[int, type[np.number]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}


def dtype_code(dtype: Any) -> int:
    """Return the code that stands for a NumPy dtype in an index header."""
    for code, known in DTYPE_CODES.items():
        if np.dtype(known) == np.dtype(dtype):
            return code
    names = ", ".join(np.dtype(known).name for known in DTYPE_CODES.values())
    raise DataError(f"dtype={np.dtype(dtype).name}: an index can hold {names}; convert the tokens to one of them.")


def optimal_dtype(vocab_size: int | None) -> type[np.number]:
    """Return the token dtype that writers use: uint16 for vocabularies below 65500, else int32."""
    return np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32


def get_idx_path(path_prefix: str) -> str:
    """Return the index file of a prefix."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """Return the token file of a prefix."""
    return path_prefix + ".bin"


class TokenReader(Protocol):
    """What reads `count` tokens that begin at byte `offset` of the `.bin` file."""

    def read(self, count: int, offset: int) -> np.ndarray:
        """Return tokens [count] in the file's dtype."""
        ...


class MappedTokenReader:
    """Reads through a memory map: no copy is made, pages are shared between processes."""

    def __init__(self, bin_path: str, dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        empty = os.path.getsize(bin_path) == 0
        self._buffer = memoryview(b"") if empty else memoryview(np.memmap(bin_path, mode="r", order="C").data)

    def read(self, count: int, offset: int) -> np.ndarray:
        """Return a read-only view of tokens [count]."""
        return np.frombuffer(self._buffer, dtype=self._dtype, count=count, offset=offset)


class FileTokenReader:
    """Reads by position, so that forked loader workers may share the descriptor (`--no-mmap-bin-files`)."""

    def __init__(self, bin_path: str, dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._file = open(bin_path, "rb", buffering=0)  # noqa: SIM115 - closed with the reader

    def read(self, count: int, offset: int) -> np.ndarray:
        """Return a copy of tokens [count]."""
        raw = os.pread(self._file.fileno(), count * self._dtype.itemsize, offset)
        return np.frombuffer(raw, dtype=self._dtype, count=count)


class IndexReader:
    """The parsed `.idx` file; its arrays are views of a memory map.

    Attributes: dtype, sequence_lengths int32[S], sequence_pointers int64[S], document_indices int64[D].
    Raises: DataError if the file is missing, foreign, truncated or contradicts itself.
    """

    def __init__(self, idx_path: str) -> None:
        if not os.path.isfile(idx_path):
            raise DataError(f"data_path={idx_path!r}: there is no such index; run tools/preprocess_data.py first.")
        size = os.path.getsize(idx_path)
        with open(idx_path, "rb") as stream:
            header = stream.read(HEADER.size)
        if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"data_path={idx_path!r}: this is no token index, it begins with {header[:9]!r} and not {MAGIC!r}; "
                "write it with tools/preprocess_data.py."
            )
        _, version, code, self.num_sequences, self.num_borders = HEADER.unpack(header)
        if version != VERSION or code not in DTYPE_CODES:
            raise DataError(
                f"data_path={idx_path!r}: index version {version} with dtype code {code}, known are version {VERSION} "
                f"and codes {min(DTYPE_CODES)} to {max(DTYPE_CODES)}; write it again with tools/preprocess_data.py."
            )
        self.dtype = DTYPE_CODES[code]
        self._map_arrays(idx_path, size)

    def _map_arrays(self, idx_path: str, size: int) -> None:
        """Map the three arrays behind the header and check that they fill the file."""
        expected = HEADER.size + 12 * self.num_sequences + 8 * self.num_borders
        if size not in (expected, expected + self.num_sequences):
            raise DataError(
                f"data_path={idx_path!r}: {size} bytes, but {self.num_sequences} sequences and {self.num_borders} "
                f"document borders need {expected}; the file is truncated or foreign, write it again."
            )
        # The memory map is kept alive by the arrays that view it.
        buffer = memoryview(np.memmap(idx_path, mode="r", order="C").data)
        pointers_at = HEADER.size + 4 * self.num_sequences
        borders_at = pointers_at + 8 * self.num_sequences
        self.sequence_lengths = np.frombuffer(buffer, "<i4", self.num_sequences, HEADER.size)
        self.sequence_pointers = np.frombuffer(buffer, "<i8", self.num_sequences, pointers_at)
        self.document_indices = np.frombuffer(buffer, "<i8", self.num_borders, borders_at)
        if self.num_borders < 1 or self.document_indices[0] != 0 or self.document_indices[-1] != self.num_sequences:
            raise DataError(
                f"data_path={idx_path!r}: the document borders must run from 0 to {self.num_sequences}, got "
                f"{self.document_indices[:1]} to {self.document_indices[-1:]}; the file is damaged, write it again."
            )

    @property
    def num_bin_bytes(self) -> int:
        """Size that the `.bin` file must have."""
        if self.num_sequences == 0:
            return 0
        last = int(self.sequence_lengths[-1]) * np.dtype(self.dtype).itemsize
        return int(self.sequence_pointers[-1]) + last


class IndexedDataset(torch.utils.data.Dataset):
    """Sequences of tokens under one path prefix.

    An item is a sequence (a document, or a sentence of it) as a NumPy array in the file's dtype; under a memory map it
    is a read-only view. `get` reads a part of one without touching the rest.
    """

    def __init__(self, path_prefix: str, mmap: bool = True) -> None:
        super().__init__()
        self._open(path_prefix, mmap)

    def _open(self, path_prefix: str, mmap: bool) -> None:
        self.path_prefix = path_prefix
        self.mmap = mmap
        self.index = IndexReader(get_idx_path(path_prefix))
        bin_path = get_bin_path(path_prefix)
        if not os.path.isfile(bin_path):
            raise DataError(f"data_path={path_prefix!r}: {bin_path} is missing beside its index; copy both files.")
        size, expected = os.path.getsize(bin_path), self.index.num_bin_bytes
        if size != expected:
            raise DataError(
                f"data_path={path_prefix!r}: {bin_path} has {size} bytes, its index asks for {expected}; the file is "
                "truncated or belongs to another index, copy or write both again."
            )
        self._reader: TokenReader = (MappedTokenReader if mmap else FileTokenReader)(bin_path, self.index.dtype)
        self._itemsize = np.dtype(self.index.dtype).itemsize

    def __getstate__(self) -> tuple[str, bool]:
        return self.path_prefix, self.mmap

    def __setstate__(self, state: tuple[str, bool]) -> None:
        self._open(*state)

    def __len__(self) -> int:
        return self.index.num_sequences

    def __getitem__(self, idx: int) -> np.ndarray:
        if not -len(self) <= idx < len(self):
            raise IndexError(f"sequence {idx} of {self.path_prefix}, which has {len(self)}")
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens [length] of sequence `idx` from `offset` on; without a length, all that follow."""
        if length is None:
            length = int(self.index.sequence_lengths[idx]) - offset
        return self._reader.read(length, int(self.index.sequence_pointers[idx]) + offset * self._itemsize)

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens per sequence, int32[S]."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> np.ndarray:
        """Document borders in sequence numbers, int64[documents + 1]."""
        return self.index.document_indices

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Say whether both files of a prefix are there."""
        return os.path.isfile(get_idx_path(path_prefix)) and os.path.isfile(get_bin_path(path_prefix))
