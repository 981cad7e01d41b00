"""Samples of a GPT: s tokens, the same tokens one place later as labels, and their masks.

The order of samples is built in gpt_index.py and kept in the index cache; an item is then one lookup in the shuffle
index and one slice of each document that the sample touches.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_index import SampleOrder, build_sample_order, plan_samples
from megatron.core.datasets.index_cache import Arrays, IndexCache, load_or_build
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.masks import (
    MaskOptions,
    cu_seqlens_of_parts,
    get_ltor_masks_and_position_ids,
    positions_from_starts,
)
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.mock_gpt import MockGPTLowLevelDataset
from megatron.core.datasets.splits import Split
from megatron.core.errors import ConfigError, DataError
from megatron.core.utils.logging import get_logger, log_single_rank

logger = get_logger(__name__)

NO_PAD = -1


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Adds what happens inside a sample."""

    reset_position_ids: bool = False
    """Positions begin again after each EOD."""
    reset_attention_mask: bool = False
    """Tokens do not attend across an EOD."""
    eod_mask_loss: bool = False
    """No loss where the input token is EOD."""
    create_attention_mask: bool = True
    """Whether each sample carries its [1, s, s] mask."""
    drop_last_partial_validation_sequence: bool = True
    """Whether validation drops the tokens that do not fill a sample; else they are padded to one."""
    add_extra_token_to_sequence: bool = True
    """Whether a sample reads s + 1 tokens; without it the last label is padding."""
    inter_document_masking: bool = False
    """Ship `cu_seqlens` and `max_seqlen` of the document parts, not a mask; positions begin again with each part."""
    allow_ambiguous_pad_tokens: bool = False
    """Whether a pad id that is also another special token is masked as padding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None:
            raise ConfigError("tokenizer=None: a GPT dataset needs EOD and vocabulary size; pass a tokenizer.")
        if self.inter_document_masking and (self.reset_position_ids or self.reset_attention_mask):
            raise ConfigError(
                "dataloader_inter_document_masking=True with reset_position_ids or reset_attention_mask: document "
                "borders already reset both; drop the reset flags."
            )


def _pad_token_id(config: GPTDatasetConfig) -> int:
    """Return the tokenizer's pad id, or -1 if it has none or shares it with another special token."""
    tokenizer = config.tokenizer
    assert tokenizer is not None, "GPTDatasetConfig requires a tokenizer"
    pad = tokenizer.pad_or_none
    if pad is None:
        return NO_PAD
    others = {name: value for name, value in tokenizer.special_ids().items() if name != "pad" and value == pad}
    if others and not config.allow_ambiguous_pad_tokens:
        log_single_rank(
            logger,
            logging.WARNING,
            f"pad token {pad} is also {', '.join(others)}: it is not masked as padding "
            "(--allow-ambiguous-pad-tokens masks it)",
        )
        return NO_PAD
    return pad


class GPTDataset(MegatronDataset):
    """Samples {tokens, labels int64 [s], loss_mask fp32 [s], position_ids int64 [s]} and, if asked for, attention_mask
    bool [1, s, s] (True = masked), or cu_seqlens int32 [s + 1] with max_seqlen.

    Raises: DataError for an empty split and, when a sample is read, for a token id outside of the vocabulary.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        assert config.tokenizer is not None, "GPTDatasetConfig requires a tokenizer"
        self._num_extra_tokens = int(config.add_extra_token_to_sequence)
        self._drop_last = index_split is not Split.valid or config.drop_last_partial_validation_sequence
        self._pad = _pad_token_id(config)
        self._may_hold_pad = self._pad != NO_PAD or not self._drop_last or not config.add_extra_token_to_sequence
        self._eod = config.tokenizer.eod
        self._vocab_size = config.tokenizer.vocab_size
        self._mask_options = MaskOptions(
            config.reset_position_ids,
            config.reset_attention_mask,
            config.eod_mask_loss,
            config.create_attention_mask and not config.inter_document_masking,
        )
        self._cached_masks: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None = None
        order = self._build_order()
        self.document_index, self.sample_index, self.shuffle_index = (
            order.document_index,
            order.sample_index,
            order.shuffle_index,
        )

    @classmethod
    def extra_identifiers(cls, index_split: Split, config: GPTDatasetConfig) -> dict[str, Any]:
        """Name the two internal options where they are not at their default."""
        extra: dict[str, Any] = {}
        if not config.add_extra_token_to_sequence:
            extra["add_extra_token_to_sequence"] = False
        if index_split is Split.valid and not config.drop_last_partial_validation_sequence:
            extra["drop_last_partial_validation_sequence"] = False
        return extra

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> IndexedDataset:
        """Open the files of a prefix."""
        assert dataset_path is not None, "GPTDataset reads files, it needs a prefix"
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of sequences."""
        return len(low_level_dataset.sequence_lengths)

    def _build_order(self) -> SampleOrder:
        """Load the three index arrays from the cache, or build them."""
        sizes = self.dataset.sequence_lengths
        num_tokens = int(sizes[self.indices].sum(dtype=np.int64)) if len(self.indices) else 0
        source = "mock_data=True" if self.dataset_path is None else f"data_path={self.dataset_path!r}"
        what = f"{source}: its {self.index_split.name} split"
        if num_tokens == 0:
            raise DataError(
                f"{what} has {len(self.indices)} of {len(sizes)} sequences and no token (split={self.config.split!r}); "
                "give it a larger share with --split, or more data."
            )
        length, extra = self.config.sequence_length, self._num_extra_tokens
        plan = plan_samples(num_tokens, length, self.num_samples, extra, self._drop_last)
        if plan.num_samples == 0:
            raise DataError(
                f"{what} has {num_tokens} tokens, one sample needs sequence_length={length} + {extra}; give it "
                "more data or lower --seq-length."
            )

        def build() -> Arrays:
            try:
                return vars(build_sample_order(sizes, self.indices, plan, length, self.config.random_seed, extra))
            except MemoryError as error:
                raise DataError(
                    f"{what}: the indices of {plan.num_samples} samples in {plan.num_epochs} epochs do not fit into "
                    "memory; lower --train-iters, --train-samples or --eval-iters."
                ) from error

        def accept(arrays: Arrays) -> bool:
            # A data file that was written again under its old name changes one of these numbers.
            return (
                len(arrays["document_index"]) == plan.num_epochs * len(self.indices)
                and len(arrays["sample_index"]) == plan.num_samples + 1
            )

        folder, names = self.cache_folder(), ("document_index", "sample_index", "shuffle_index")
        stem = f"{type(self).__name__}-{self.index_split.name}"
        cache = IndexCache(folder, self.unique_description, stem, names) if folder else None
        start = time.monotonic()
        arrays, is_hit = load_or_build(cache, build, accept)
        log_single_rank(
            logger,
            logging.INFO,
            f"{what}: {plan.num_samples} samples in {plan.num_epochs} epochs, indices "
            f"{'loaded from the cache' if is_hit else 'built'} in {time.monotonic() - start:.2f} s",
        )
        return SampleOrder(**{name: arrays[name] for name in names})

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        text, part_lengths = self._read(0 if idx is None else int(idx))
        stream = torch.from_numpy(text)
        if self._num_extra_tokens:
            tokens, labels = stream[:-1], stream[1:].clone()
        else:
            tokens, labels = stream, torch.cat((stream[1:], torch.tensor([self._pad])))
        attention_mask, loss_mask, position_ids = self._masks(tokens)
        if self._may_hold_pad:
            is_pad = labels == self._pad
            loss_mask[is_pad] = 0.0
            labels[is_pad] = 0
            tokens = torch.where(tokens == self._pad, 0, tokens)
        self._check_vocabulary(tokens, labels, idx)
        if idx is None:
            loss_mask.zero_()
        sample: dict[str, Any] = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
        }
        if attention_mask is not None:
            sample["attention_mask"] = attention_mask
        if self.config.inter_document_masking:
            parts = _input_parts(part_lengths, tokens.numel())
            sample["cu_seqlens"], sample["max_seqlen"] = cu_seqlens_of_parts(parts, tokens.numel())
            starts = sample["cu_seqlens"][: len(parts)].to(torch.int64)
            sample["position_ids"] = positions_from_starts(starts, tokens.numel())
        return sample

    def _masks(self, tokens: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return masks of tokens [s] that the caller may change."""
        if self._mask_options.depends_on_tokens:
            return get_ltor_masks_and_position_ids(tokens, self._eod, self._mask_options)
        if self._cached_masks is None:
            self._cached_masks = get_ltor_masks_and_position_ids(tokens, self._eod, self._mask_options)
        attention_mask, loss_mask, position_ids = self._cached_masks
        return None if attention_mask is None else attention_mask.clone(), loss_mask.clone(), position_ids.clone()

    def _check_vocabulary(self, tokens: torch.Tensor, labels: torch.Tensor, idx: int | None) -> None:
        """Refuse ids in tokens [s] or labels [s] that the embedding does not have; padding is replaced before."""
        low, high = torch.aminmax(tokens)
        for token in (int(low), int(high), int(labels[-1])):
            if not 0 <= token < self._vocab_size:
                raise DataError(
                    f"data_path={self.dataset_path!r}: sample {idx} of {self.index_split.name} holds token id {token}, "
                    f"the tokenizer has {self._vocab_size} ids; the files were made with another tokenizer: "
                    "name that one, or run tools/preprocess_data.py again."
                )

    def _read(self, idx: int) -> tuple[np.ndarray, list[int]]:
        """Return the tokens of a sample, int64 [s + x], and how many of them each document gives."""
        place = int(self.shuffle_index[idx])
        (first, first_offset), (last, last_end) = self.sample_index[place : place + 2].tolist()
        last_end += self._num_extra_tokens
        length = self.config.sequence_length + self._num_extra_tokens
        text = np.full(length, self._pad, dtype=np.int64)
        part_lengths = []
        filled = 0
        for row in range(first, last + 1):
            offset = first_offset if row == first else 0
            count = last_end - offset if row == last else None
            part = self.dataset.get(int(self.document_index[row]), offset, count)
            text[filled : filled + len(part)] = part
            filled += len(part)
            part_lengths.append(len(part))
        return text, part_lengths


def _input_parts(part_lengths: list[int], sequence_length: int) -> list[int]:
    """Cut part lengths of s + x tokens down to the s inputs; parts without an input are left out."""
    borders = np.minimum(np.cumsum(part_lengths), sequence_length)
    return [int(count) for count in np.diff(borders, prepend=0) if count]


class MockGPTDataset(GPTDataset):
    """A GPT dataset of synthetic documents; it needs no file."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> MockGPTLowLevelDataset:
        """Make the synthetic documents for the tokenizer's vocabulary."""
        assert config.tokenizer is not None, "GPTDatasetConfig requires a tokenizer"
        return MockGPTLowLevelDataset(config.tokenizer.vocab_size, config.tokenizer.eod)
