"""What to build: paths, shares, seed and sequence length of the datasets of one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.core.datasets.splits import Blend, Bookends, Split, check_blend, parse_split, split_bookends
from megatron.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import MegatronTokenizer


@dataclass
class BlendedMegatronDatasetConfig:
    """Field names are upstream's; `mock` and `split_matrix` follow from the others."""

    random_seed: int
    """Seed of every random order; the same for all datasets, splits and ranks."""
    sequence_length: int
    """Tokens per sample, the extra label token not counted."""
    blend: Blend | None = None
    """(prefixes, weights or None), divided by `split`; without it and `blend_per_split` the data is synthetic."""
    blend_per_split: list[Blend | None] | None = None
    """One blend for each of train, valid, test; each uses its files whole."""
    multiple_validation_sets: bool = False
    """Whether the validation prefixes stay apart: the builder then gives a list of datasets."""
    full_validation: bool = False
    """Whether validation takes each sample once (the number of validation samples is then None)."""
    split: str | None = None
    """Proportions of train, valid, test; only with `blend` or synthetic data."""
    num_dataset_builder_threads: int = 1
    """Threads that build the datasets of a blend."""
    path_to_cache: str | None = None
    """Folder of the index cache; None puts it beside each dataset."""
    mmap_bin_files: bool = True
    """Whether `.bin` files are mapped rather than read."""
    tokenizer: MegatronTokenizer | None = None
    """Supplies EOD, pad and vocabulary size, and is part of the cache key."""
    mid_level_dataset_surplus: float = 0.005
    """Share of samples that each dataset of a blend is built larger than its contribution."""
    mock: bool = field(init=False, default=False)
    """Whether the data is synthetic."""
    split_matrix: Bookends | None = field(init=False, default=None)
    """[low, high) fractions of each split."""

    def __post_init__(self) -> None:
        if self.blend is not None and self.blend_per_split is not None:
            raise ConfigError("blend and blend_per_split are both set: one source of data is possible; drop one.")
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length={self.sequence_length}: at least 1 is needed; set --seq-length.")
        if self.blend_per_split is not None:
            if self.split is not None:
                raise ConfigError(
                    f"split={self.split!r} with a blend per split: each split takes its files whole; "
                    "drop --split or give one --data-path."
                )
            for split, blend in zip(Split, self.blend_per_split, strict=True):
                if blend is not None:
                    check_blend(blend, f"{split.name}_data_path")
            return
        if self.blend is not None:
            check_blend(self.blend)
        self.mock = self.blend is None
        if self.split is None:
            self.split = "1,1,1" if self.mock else "969, 30, 1"
        self.split_matrix = split_bookends(parse_split(self.split))
