"""Synthetic documents that need no file: the same for every run, split and rank."""

from __future__ import annotations

import numpy as np

NUM_DOCUMENTS = 100_000
MAX_DOCUMENT_TOKENS = 4096


class MockGPTLowLevelDataset:
    """Documents 1, 2, ..., L - 1 (modulo the vocabulary), then EOD, with lengths L drawn once from seed 0."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self._eod = eod
        generator = np.random.default_rng(0)
        self.sequence_lengths = generator.integers(1, MAX_DOCUMENT_TOKENS, size=NUM_DOCUMENTS).astype(np.int32)
        self._tokens = np.arange(1, MAX_DOCUMENT_TOKENS, dtype=np.int64) % vocab_size

    def __len__(self) -> int:
        return NUM_DOCUMENTS

    def __getitem__(self, idx: int) -> np.ndarray:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens int64 [length] of document `idx` from `offset` on."""
        end = int(self.sequence_lengths[idx])
        stop = end if length is None else offset + length
        tokens = self._tokens[offset:stop].copy()
        if stop == end:
            tokens[-1] = self._eod
        return tokens
