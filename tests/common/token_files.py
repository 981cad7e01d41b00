"""Small token files and a tokenizer to read them with, for tests of the data path."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.datasets.splits import Split
from megatron.core.tokenizers.base import MegatronTokenizer

VECTOR_LENGTHS = (5, 3, 9, 1, 7, 4)


class ToyTokenizer(MegatronTokenizer):
    """Numbers as text, with special ids as the test wants them."""

    def __init__(self, vocab_size: int = 100, **special: int) -> None:
        super().__init__(vocab_size=vocab_size, **special)
        self._vocab_size = vocab_size
        self._ids = {"eod": vocab_size - 1, **special}

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def _special(self, name: str) -> int | None:
        return self._ids.get(name)


def write_tokens(prefix: object, documents: Iterable[Sequence[int]], dtype: type = np.uint16) -> str:
    """Write one-sequence documents and return the prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document, dtype=np.int64), [len(document)] if len(document) else [])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def vector_documents(lengths: Sequence[int] = VECTOR_LENGTHS) -> list[list[int]]:
    """Documents that count on modulo 98, each with 99 as its last token."""
    starts = itertools.accumulate(lengths, initial=0)
    return [
        [*((start + place) % 98 for place in range(length - 1)), 99]
        for start, length in zip(starts, lengths, strict=False)
    ]


def gpt_config(sequence_length: int = 8, seed: int = 1234, **options: object) -> GPTDatasetConfig:
    """A config without attention masks."""
    values = {"tokenizer": ToyTokenizer(), "create_attention_mask": False, "split": "1,0,0", "blend": (["p"], None)}
    return GPTDatasetConfig(random_seed=seed, sequence_length=sequence_length, **{**values, **options})


def gpt_dataset(
    prefix: str, num_samples: int | None = None, index_split: Split = Split.train, **options: object
) -> GPTDataset:
    """A GPT dataset over all sequences of a prefix."""
    config = gpt_config(**options)
    low_level = IndexedDataset(prefix, mmap=config.mmap_bin_files)
    indices = np.arange(len(low_level), dtype=np.int32)
    return GPTDataset(low_level, prefix, indices, num_samples, index_split, config)
