"""The order of training samples: a pure function of sequence lengths, seed, sequence length and request.

Three arrays define it. The document index says in which order sequences are read, over as many epochs as the request
needs; the sample index cuts that stream of tokens into samples; the shuffle index says which sample is delivered when.
All random numbers come from one legacy `numpy.random.RandomState(seed)`, used first for the document index and then for
the shuffle index, so that the order for a seed is the one that other Megatron trees produce.

Symbols: s = sequence length, x = extra tokens for the labels (0 or 1), T = tokens per epoch, e = epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.index_kernels import build_sample_index

SEPARATE_BELOW = 0.80


@dataclass(frozen=True)
class SamplePlan:
    """The numbers that follow from the request before anything is shuffled."""

    num_epochs: int
    """How often the documents are read."""
    is_last_epoch_separate: bool
    """Whether the last epoch is shuffled on its own, because little of it is needed."""
    num_samples: int
    """Samples that the epochs give; at least as many as requested."""
    num_samples_before_last_epoch: int
    """Samples of all epochs but the last; they are shuffled among themselves if it is separate."""


@dataclass(frozen=True)
class SampleOrder:
    """The three index arrays."""

    document_index: np.ndarray
    """int32[e * documents]: the order in which sequences are read."""
    sample_index: np.ndarray
    """int32 or int64 [N + 1, 2]: position in the document index and token offset where each sample begins."""
    shuffle_index: np.ndarray
    """uint32 or int64 [N]: the sample delivered at each place."""


def plan_samples(
    num_tokens: int, sequence_length: int, num_requested: int | None, num_extra_tokens: int = 1, drop_last: bool = True
) -> SamplePlan:
    """Choose the number of epochs and samples for T = num_tokens > 0; a request of None means one epoch."""
    num_epochs = 1
    if num_requested is not None:
        needed = num_requested * sequence_length + num_extra_tokens
        num_epochs = max(1, -(-needed // num_tokens))
    usable = num_epochs * num_tokens - num_extra_tokens
    num_samples = usable // sequence_length if drop_last else -(-usable // sequence_length)
    if num_epochs == 1 or num_requested is None:
        return SamplePlan(num_epochs, False, num_samples, 0)
    before_last = (usable - num_tokens) // sequence_length
    from_last = num_requested - before_last
    per_epoch = (num_tokens - num_extra_tokens) // sequence_length
    assert 0 <= from_last <= per_epoch + 1, f"{from_last} samples from the last of {num_epochs} epochs of {per_epoch}"
    is_separate = from_last < int(SEPARATE_BELOW * per_epoch)
    return SamplePlan(num_epochs, is_separate, num_samples, before_last)


def _shuffled_documents(indices: np.ndarray, num_epochs: int, rng: np.random.RandomState) -> np.ndarray:
    """Return the indices, tiled over the epochs and shuffled as a whole: int32 [epochs * len(indices)]."""
    documents = np.tile(indices.astype(np.int32, copy=False), num_epochs)
    rng.shuffle(documents)
    return documents


def build_document_index(indices: np.ndarray, plan: SamplePlan, rng: np.random.RandomState) -> np.ndarray:
    """Return the reading order of the sequences `indices`, int32 [epochs * len(indices)]."""
    if not plan.is_last_epoch_separate:
        return _shuffled_documents(indices, plan.num_epochs, rng)
    first = _shuffled_documents(indices, plan.num_epochs - 1, rng)
    return np.concatenate((first, _shuffled_documents(indices, 1, rng)))


def build_shuffle_index(plan: SamplePlan, rng: np.random.RandomState) -> np.ndarray:
    """Return the delivery order of the samples [N]."""
    dtype = np.int64 if plan.num_samples >= 2**32 - 2 else np.uint32
    border = plan.num_samples_before_last_epoch if plan.is_last_epoch_separate else plan.num_samples
    order = np.arange(plan.num_samples, dtype=dtype)
    rng.shuffle(order[:border])
    if border < plan.num_samples:
        rng.shuffle(order[border:])
    return order


def build_sample_order(
    sizes: np.ndarray,
    indices: np.ndarray,
    plan: SamplePlan,
    sequence_length: int,
    seed: int,
    num_extra_tokens: int = 1,
) -> SampleOrder:
    """Build the three arrays for sequences `indices` of a file whose lengths are sizes int32[S]."""
    rng = np.random.RandomState(seed)
    document_index = build_document_index(indices, plan, rng)
    num_tokens = plan.num_epochs * int(sizes[indices].sum(dtype=np.int64))
    num_full = min(plan.num_samples, (num_tokens - num_extra_tokens) // sequence_length)
    sample_index = build_sample_index(sizes, document_index, sequence_length, num_full, num_extra_tokens)
    if num_full < plan.num_samples:
        # The short last sample ends with the last token there is.
        row = int(np.flatnonzero(sizes[document_index])[-1])
        end = [[row, int(sizes[document_index[row]]) - num_extra_tokens]]
        sample_index = np.concatenate((sample_index, np.array(end, dtype=sample_index.dtype)))
    return SampleOrder(document_index, sample_index, build_shuffle_index(plan, rng))
