"""Build the train, valid and test datasets of a run from a blend, a blend per split, or synthetic data.

Several ranks share one index cache, or have one each. They build in three waves, with a barrier after each:

    global rank 0 -> the first rank of each node -> all others

A rank that finds the cache filled loads it; one that does not (its folder is on another disk) builds. If one rank
fails, all learn its message at the barrier and raise, so that none waits for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron.core import env
from megatron.core.datasets.blended_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.splits import Blend, Split, blend_sizes, normalize, split_indices, with_surplus
from megatron.core.errors import DataError
from megatron.core.utils.collectives import all_gather_object, world_group
from megatron.core.utils.logging import get_logger, log_single_rank

logger = get_logger(__name__)

TopLevelDataset = MegatronDataset | BlendedDataset
SplitResult = TopLevelDataset | list[TopLevelDataset] | None


class BlendedMegatronDatasetBuilder:
    """Builds one dataset for each split.

    `sizes` are the samples wanted of train, valid and test: None means one epoch, 0 means no dataset.
    `is_built_on_rank` says whether this rank needs the data; a rank that does not gets None three times.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        assert len(sizes) == len(Split), f"{len(sizes)} sizes for {len(Split)} splits"
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config

    def build(self) -> list[SplitResult]:
        """Return the datasets of train, valid and test.

        Raises: DataError, on all ranks, if the data of one rank is missing, damaged or too small.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self._build_all() if self.is_built_on_rank() else [None] * len(Split)
        result: list[SplitResult] = [None] * len(Split)
        my_wave = _wave_of_rank()
        for wave in range(3):
            error = None
            if wave == my_wave and self.is_built_on_rank():
                try:
                    result = self._build_all()
                except (DataError, IndexError, OSError) as caught:
                    error = caught
            _share_error(error)
        return result

    def _build_all(self) -> list[SplitResult]:
        config = self.config
        results: list[SplitResult] = []
        for split in Split:
            blend = config.blend if config.blend_per_split is None else config.blend_per_split[split.value]
            bookends = None if config.split_matrix is None else config.split_matrix[split.value]
            # Without a split matrix each split has files of its own; with one, no bookends mean no share.
            is_absent = blend is None if config.split_matrix is None else bookends is None
            if is_absent or self.sizes[split.value] == 0:
                results.append(None)
            elif blend is None:
                results.append(self._build_one(None, split, bookends, self.sizes[split.value]))
            else:
                results.append(self._build_blend(blend, split, bookends))
        return results

    def _build_blend(self, blend: Blend, split: Split, bookends: tuple[float, float] | None) -> SplitResult:
        """Build the blend of one split; bookends None takes the files whole."""
        prefixes, weights = blend
        size = self.sizes[split.value]
        if len(prefixes) == 1:
            return self._build_one(prefixes[0], split, bookends, size)
        if split is Split.valid and self.config.multiple_validation_sets:
            return list(self._build_many(prefixes, split, bookends, [size] * len(prefixes)))
        if weights is None or size is None:
            datasets = self._build_many(prefixes, split, bookends, [None] * len(prefixes))
            return self._blend_by_length(datasets, size)
        shares = normalize(weights)
        counts = blend_sizes(shares, size)
        surplus = self.config.mid_level_dataset_surplus
        datasets = self._build_many(prefixes, split, bookends, [with_surplus(count, surplus) for count in counts])
        return BlendedDataset(datasets, shares, sum(counts), self.config)

    def _blend_by_length(self, datasets: list[MegatronDataset], size: int | None) -> BlendedDataset:
        """Blend one epoch of each dataset: all of it, or as much of it as is asked for."""
        lengths = [len(dataset) for dataset in datasets]
        if size is None or size >= sum(lengths):
            if size is not None and size > sum(lengths):
                log_single_rank(
                    logger,
                    logging.WARNING,
                    f"{datasets[0].index_split.name}: {size} samples are wanted, a blend without weights has one epoch "
                    f"of {sum(lengths)}; give each prefix a weight to read it again",
                )
            return BlendedDataset(datasets, lengths, None, self.config)
        return BlendedDataset(datasets, lengths, size, self.config)

    def _build_many(
        self,
        prefixes: Sequence[str],
        split: Split,
        bookends: tuple[float, float] | None,
        sizes: Sequence[int | None],
    ) -> list[MegatronDataset]:
        """Build a dataset for each prefix, in threads if the config says so."""

        def build(item: tuple[str, int | None]) -> MegatronDataset:
            return self._build_one(item[0], split, bookends, item[1])

        items = list(zip(prefixes, sizes, strict=True))
        num_threads = min(self.config.num_dataset_builder_threads, len(items))
        if num_threads <= 1:
            return [build(item) for item in items]
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(build, items))

    def _build_one(
        self, prefix: str | None, split: Split, bookends: tuple[float, float] | None, size: int | None
    ) -> MegatronDataset:
        """Build the dataset of one prefix and split."""
        low_level: Any = self.cls.build_low_level_dataset(prefix, self.config)
        num_sequences = self.cls.numel_low_level_dataset(low_level)
        if num_sequences == 0:
            raise DataError(
                f"data_path={prefix!r}: the index is empty; preprocess a corpus with at least one document."
            )
        if bookends is None:
            indices = np.arange(num_sequences, dtype=np.int32)
        else:
            indices = split_indices(bookends, num_sequences)
        return self.cls(low_level, prefix, indices, size, split, self.config)


def _wave_of_rank() -> int:
    """Return 0 for the first rank of the world, 1 for the first of each other node, 2 for the rest."""
    if dist.get_rank() == 0:
        return 0
    return 1 if env.local_rank() == 0 else 2


def _share_error(error: Exception | None) -> None:
    """Wait for all ranks; raise if one of them failed."""
    messages = all_gather_object(None if error is None else str(error), world_group())
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise DataError(f"rank {rank}: {message}")
