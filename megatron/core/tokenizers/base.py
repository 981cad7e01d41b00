"""What every tokenizer answers: text to ids and back, its special ids, and the identifiers that key index caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.errors import DataError

SPECIAL_NAMES = ("eod", "bos", "eos", "pad", "cls", "sep", "mask", "unk")


def check_readable(field: str, path: str) -> None:
    """Raise DataError if the file that the flag of `field` names cannot be opened."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        flag = "--" + field.replace("_", "-")
        raise DataError(f"{field}={path!r}: it cannot be read ({error.strerror}); name a file with {flag}.") from error


class MegatronTokenizer(ABC):
    """A mapping between text and token ids 0 to vocab_size - 1.

    Special ids that a tokenizer does not have raise DataError when they are asked for; `special_ids` lists those there
    are. `identifiers` are what the tokenizer was built from: two tokenizers with equal ones give equal ids.
    """

    def __init__(self, *paths: str, **options: Any) -> None:
        self.unique_identifiers: dict[str, Any] = {
            "class": type(self).__name__,
            "tokenizer_path": list(paths),
            **{name: str(value) for name, value in options.items()},
        }

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text; no special token but those that the model adds by itself."""

    def _encode(self, text: str) -> Sequence[int] | np.ndarray:
        """Return what `tokenize` does; a tokenizer that can make an array without a list overrides this."""
        return self.tokenize(text)

    def tokenize_array(self, text: str, dtype: np.dtype) -> np.ndarray:
        """Return the ids of a text as an array [n].

        Raises: DataError for an id that is not below the vocabulary size.
        """
        ids = np.asarray(self._encode(text))
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise DataError(
                f"tokenizer_type={type(self).__name__!r}: the text holds token id {bad}, the vocabulary has "
                f"{self.vocab_size} ids; raise --vocab-size or correct the text."
            )
        return ids.astype(dtype)

    @abstractmethod
    def detokenize(self, ids: list[int]) -> str:
        """Return the text of ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids before padding."""

    def _special(self, name: str) -> int | None:
        """Return the id of a special token by its name in SPECIAL_NAMES, or None."""
        return None

    def special_ids(self) -> dict[str, int]:
        """Return the special ids that this tokenizer has, by name."""
        found = {name: self._special(name) for name in SPECIAL_NAMES}
        return {name: value for name, value in found.items() if value is not None}

    def _required(self, name: str) -> int:
        value = self._special(name)
        if value is None:
            raise DataError(
                f"tokenizer_type={type(self).__name__!r}: it has no {name} token; choose a tokenizer that defines one."
            )
        return value

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        return self._required("eod")

    @property
    def bos(self) -> int:
        """Id that begins a sequence."""
        return self._required("bos")

    @property
    def eos(self) -> int:
        """Id that ends a sequence."""
        return self._required("eos")

    @property
    def pad(self) -> int:
        """Id of padding."""
        return self._required("pad")

    @property
    def pad_or_none(self) -> int | None:
        """Id of padding, or None; it may lie outside of the vocabulary."""
        return self._special("pad")
