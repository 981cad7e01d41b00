"""Several datasets read as one, each in proportion to its weight."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.index_cache import Arrays, IndexCache, description_hash, load_or_build
from megatron.core.datasets.index_kernels import build_blending_indices, build_exhaustive_blending_indices
from megatron.core.datasets.megatron_dataset import MegatronDataset, describe
from megatron.core.datasets.splits import normalize
from megatron.core.utils.logging import get_logger, log_single_rank

logger = get_logger(__name__)

_NAMES = ("dataset_index", "dataset_sample_index")


class BlendedDataset(torch.utils.data.Dataset):
    """Sample i is sample `dataset_sample_index[i]` of dataset `dataset_index[i]`, plus its `dataset_id`.

    With a size the order is greedy by weight; without one every sample of every dataset appears once.
    Raises: IndexError if the order asks more of a dataset than it holds.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.datasets = list(datasets)
        self.weights = normalize(weights)
        self.size = size
        self.config = config
        self.index_split = datasets[0].index_split
        self.unique_identifiers: dict[str, Any] = {
            "class": type(self).__name__,
            "datasets": [dataset.unique_identifiers for dataset in datasets],
            "split": self.index_split.name,
            "weights": self.weights,
            "size": size,
        }
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = description_hash(self.unique_description)
        self.dataset_index, self.dataset_sample_index = self._build_order()
        self._check_requests()

    def cache_folder(self) -> str | None:
        """Return the folder of the index cache; None keeps indices in memory."""
        if self.config.path_to_cache is not None:
            return self.config.path_to_cache
        prefix = self.datasets[0].dataset_path
        return None if prefix is None else os.path.join(prefix, "cache", f"{type(self).__name__}_indices")

    def _build_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Load the order int16 [n], int64 [n] from the cache, or build it."""
        lengths = np.array([len(dataset) for dataset in self.datasets], dtype=np.int64)
        total = int(lengths.sum()) if self.size is None else self.size

        def build() -> Arrays:
            if self.size is None:
                order = build_exhaustive_blending_indices(lengths)
            else:
                order = build_blending_indices(np.array(self.weights), self.size)
            return dict(zip(_NAMES, order, strict=True))

        folder = self.cache_folder()
        stem = f"{type(self).__name__}-{self.index_split.name}"
        cache = IndexCache(folder, self.unique_description, stem, _NAMES) if folder else None
        start = time.monotonic()
        arrays, is_hit = load_or_build(cache, build, lambda found: all(len(found[name]) == total for name in _NAMES))
        log_single_rank(
            logger,
            logging.INFO,
            f"blend of {len(self.datasets)} datasets for {self.index_split.name}: {total} samples, indices "
            f"{'loaded from the cache' if is_hit else 'built'} in {time.monotonic() - start:.2f} s",
        )
        return arrays["dataset_index"], arrays["dataset_sample_index"]

    def _check_requests(self) -> None:
        requested = np.bincount(self.dataset_index, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, requested.tolist(), strict=True):
            if count > len(dataset):
                raise IndexError(
                    f"data_path={dataset.dataset_path!r}: the blend asks for {count} samples, the dataset has "
                    f"{len(dataset)}; raise mid_level_dataset_surplus={self.config.mid_level_dataset_surplus}."
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        if idx is None:  # a sample without a token that counts
            return {"dataset_id": 0, **self.datasets[0][None]}
        dataset_id = int(self.dataset_index[idx])
        sample = self.datasets[dataset_id][int(self.dataset_sample_index[idx])]
        return {"dataset_id": dataset_id, **sample}
