"""What every dataset of one file and one split has: where it comes from and the text that names it."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.index_cache import description_hash
from megatron.core.datasets.splits import Split


def describe(identifiers: dict[str, Any]) -> str:
    """Return identifiers as the JSON text whose md5 is a cache key; tokenizers answer with their own identifiers."""
    return json.dumps(identifiers, indent=4, default=lambda value: value.unique_identifiers)


class MegatronDataset(ABC, torch.utils.data.Dataset):
    """Samples of one low-level dataset, restricted to the sequences of one split."""

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indexed_indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.unique_identifiers: dict[str, Any] = {
            "class": type(self).__name__,
            "dataset_path": dataset_path,
            "num_samples": num_samples,
            "index_split": index_split.name,
            **{name: getattr(config, name) for name in self.key_config_attributes()},
            **self.extra_identifiers(index_split, config),
        }
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = description_hash(self.unique_description)

    @staticmethod
    def key_config_attributes() -> list[str]:
        """Return the fields of the config that change the samples."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    @classmethod
    def extra_identifiers(cls, index_split: Split, config: Any) -> dict[str, Any]:
        """Return what else the samples depend on; empty by default, so that the key is the one of other trees."""
        return {}

    def cache_folder(self) -> str | None:
        """Return the folder of the index cache; None keeps indices in memory."""
        if self.config.path_to_cache is not None:
            return self.config.path_to_cache
        if self.dataset_path is None:
            return None
        return os.path.join(self.dataset_path, "cache", f"{type(self).__name__}_indices")

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Open what holds the sequences."""

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of sequences that a split divides."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Return a sample by name of its fields; None asks for a stand-in without loss."""
