"""The tokenizer for data that is ids already."""

from __future__ import annotations

from megatron.core.errors import DataError
from megatron.core.tokenizers.base import MegatronTokenizer


class NullTokenizer(MegatronTokenizer):
    """Text that is already ids, written as numbers with spaces between; the last id is the end of document."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size)
        self._vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """Return the numbers in a text."""
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(
                f"tokenizer_type='NullTokenizer': its text is numbers, got {text[:40]!r} ({error}); "
                "choose a tokenizer for words."
            ) from error

    def detokenize(self, ids: list[int]) -> str:
        """Return ids as numbers with spaces between."""
        return " ".join(str(token) for token in ids)

    @property
    def vocab_size(self) -> int:
        """The size that was given."""
        return self._vocab_size

    def _special(self, name: str) -> int | None:
        return self._vocab_size - 1 if name == "eod" else None
