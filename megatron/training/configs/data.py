"""Where samples come from and how they are cut."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.flag_spec import knob


@dataclasses.dataclass(kw_only=True)
class DataConfig(ConfigTopic):
    """Data."""

    data_path: list[str] | None = None
    """One prefix, several, or weights and prefixes in turn; divided by --split."""

    train_data_path: list[str] | None = None
    """The same for training only."""

    valid_data_path: list[str] | None = None
    """The same for validation only."""

    test_data_path: list[str] | None = None
    """The same for the test only."""

    data_args_path: str | None = None
    """File that holds the words of --data-path."""

    per_split_data_args_path: str | None = None
    """JSON file with the blends of train, valid and test."""

    split: str = knob(None)
    """Proportions of train, valid and test; unset with --data-path: 969, 30, 1."""

    data_cache_path: str | None = None
    """Folder of the sample indices."""

    mock_data: bool = False
    """Synthetic documents instead of files."""

    mmap_bin_files: bool = knob(True, flag="--no-mmap-bin-files")
    """Map token files into memory; the flag reads them by seeking."""

    num_workers: int = 2
    """Loader processes of each rank."""

    num_dataset_builder_threads: int = 1
    """Threads that build datasets on each rank."""

    dataloader_type: Literal["single", "cyclic", "external"] = knob(None)
    """Order of the samples; unset: single."""

    data_sharding: bool = knob(True, flag="--no-data-sharding")
    """The cyclic order gives each rank a shard of its own; the flag shares one permutation."""

    reset_position_ids: bool = False
    """Restart positions after the end of a document."""

    reset_attention_mask: bool = False
    """Hide earlier documents of the sample from attention."""

    eod_mask_loss: bool = False
    """No loss where the input is the end of a document."""

    create_attention_mask_in_dataloader: bool = knob(True, flag="--no-create-attention-mask-in-dataloader")
    """Loaders ship attention masks; the flag leaves them out."""

    def derive(self) -> None:
        """Defaults that depend on the source."""
        self.fill("dataloader_type", "single", "default order")
        if self.data_path is not None or self.data_args_path is not None:
            self.fill("split", "969, 30, 1", "data from one blend")

    def check(self) -> list[Violation]:
        """At most one source."""
        per_split = [name for name in ("train_data_path", "valid_data_path", "test_data_path") if getattr(self, name)]
        sources = [
            name
            for name in ("data_path", "data_args_path", "per_split_data_args_path")
            if getattr(self, name) is not None
        ]
        sources += ["mock_data"] if self.mock_data else []
        sources += per_split[:1]
        found = []
        if len(sources) > 1:
            remedy = "keep one of " + ", ".join("--" + name.replace("_", "-") for name in sources)
            found.append(violation(self, " ".join(sources), "a run has one source of data", remedy))
        is_split = self.split is not None and "split" not in self.origins
        if is_split and (per_split or self.per_split_data_args_path):
            source = per_split[0] if per_split else "per_split_data_args_path"
            remedy = "drop --split"
            found.append(violation(self, f"split {source}", "the source is divided already", remedy))
        if self.reset_attention_mask and not self.create_attention_mask_in_dataloader:
            names = "reset_attention_mask create_attention_mask_in_dataloader"
            remedy = "drop --no-create-attention-mask-in-dataloader or --reset-attention-mask"
            found.append(violation(self, names, "documents are hidden by the loader's masks", remedy))
        if self.num_workers < 0:
            found.append(violation(self, "num_workers", "not negative", "set --num-workers to 0 or more"))
        if self.num_dataset_builder_threads < 1:
            remedy = "set --num-dataset-builder-threads to 1 or more"
            found.append(violation(self, "num_dataset_builder_threads", "at least 1", remedy))
        return found
