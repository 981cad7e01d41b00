"""Build sample and blending indices, in C++ if the extension is compiled, else in NumPy with the same bits.

Which of the two runs is said once per process in one log line.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import numpy as np

from megatron.core.optional_deps import is_available, require
from megatron.core.utils.logging import get_logger, log_single_rank

logger = get_logger(__name__)


@cache
def _compiled() -> ModuleType | None:
    """Return the C++ extension, or None if it was not built."""
    found = is_available("helpers_cpp")
    which = "the C++ extension" if found else "NumPy (no compiled extension, the same bits)"
    log_single_rank(logger, logging.INFO, f"data indices are built by {which}")
    return require("helpers_cpp") if found else None


def build_sample_index(
    sizes: np.ndarray, document_index: np.ndarray, sequence_length: int, num_samples: int, num_extra_tokens: int
) -> np.ndarray:
    """Return where each sample begins: [num_samples + 1, 2] of (position in the document index, token offset).

    sizes int32[S] are the lengths of all sequences, document_index int32[n] is the order in which they are read. Entry
    i is the token at place i * sequence_length of that stream, told by the document that contains it; without an extra
    token, a boundary that falls on the end of a document is told as that end. Adjacent samples share the extra token.
    int32 if every entry fits, else int64.
    """
    largest = max(len(document_index), int(sizes.max()) if len(sizes) else 0)
    dtype = np.int32 if largest <= 2**31 - 1 else np.int64
    helpers = _compiled()
    if helpers is None:
        return sample_index_numpy(sizes, document_index, sequence_length, num_samples, num_extra_tokens).astype(dtype)
    build = helpers.build_sample_idx_int32 if dtype is np.int32 else helpers.build_sample_idx_int64
    return build(sizes, document_index, sequence_length, num_samples, num_extra_tokens)


def sample_index_numpy(
    sizes: np.ndarray, document_index: np.ndarray, sequence_length: int, num_samples: int, num_extra_tokens: int
) -> np.ndarray:
    """The closed form of `build_sample_index`: one binary search per sample. Returns int64 [num_samples + 1, 2]."""
    ends = np.cumsum(sizes[document_index], dtype=np.int64)
    places = np.arange(num_samples + 1, dtype=np.int64) * sequence_length
    rows = np.searchsorted(ends, places, side="right" if num_extra_tokens else "left")
    starts = np.concatenate(([0], ends))[rows]
    return np.stack((rows, places - starts), axis=1)


def build_blending_indices(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return dataset_index int16[size] and dataset_sample_index int64[size] for weights float64[k] with sum 1.

    Greedy: sample i comes from the dataset that lags most behind its share, the maximum of w_k * max(i, 1) - count_k;
    ties go to the lowest k.
    """
    weights = np.ascontiguousarray(weights, dtype=np.float64)
    helpers = _compiled()
    return (helpers.build_blending_indices if helpers else blending_indices_numpy)(weights, size)


def blending_indices_numpy(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The plain form of `build_blending_indices`."""
    dataset_index = np.zeros(size, dtype=np.int16)
    dataset_sample_index = np.zeros(size, dtype=np.int64)
    counts = np.zeros(len(weights), dtype=np.int64)
    for i in range(size):
        k = int(np.argmax(weights * max(float(i), 1.0) - counts))
        dataset_index[i], dataset_sample_index[i] = k, counts[k]
        counts[k] += 1
    return dataset_index, dataset_sample_index


def build_exhaustive_blending_indices(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the greedy order over all samples of datasets of int64[k] sizes: int16[sum], int64[sum].

    The weights are the shares of the sizes, and a dataset without samples left no longer takes part.
    """
    sizes = np.ascontiguousarray(sizes, dtype=np.int64)
    helpers = _compiled()
    return (helpers.build_exhaustive_blending_indices if helpers else exhaustive_blending_indices_numpy)(sizes)


def exhaustive_blending_indices_numpy(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The plain form of `build_exhaustive_blending_indices`."""
    total = int(sizes.sum())
    weights = sizes / np.float64(total) if total else sizes.astype(np.float64)
    dataset_index = np.zeros(total, dtype=np.int16)
    dataset_sample_index = np.zeros(total, dtype=np.int64)
    counts = np.zeros(len(sizes), dtype=np.int64)
    for i in range(total):
        lag = np.where(counts < sizes, weights * max(float(i), 1.0) - counts, -np.inf)
        k = int(np.argmax(lag))
        dataset_index[i], dataset_sample_index[i] = k, counts[k]
        counts[k] += 1
    return dataset_index, dataset_sample_index
