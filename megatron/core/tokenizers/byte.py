"""The tokenizer that needs no file: one id per byte of UTF-8."""

from __future__ import annotations

import numpy as np

from megatron.core.tokenizers.base import MegatronTokenizer

NUM_BYTES = 256


class ByteTokenizer(MegatronTokenizer):
    """The UTF-8 bytes of a text as ids 0 to 255, and 256 as end of document."""

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8"))

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of bytes; end-of-document ids are left out, broken characters are replaced."""
        return bytes(token for token in ids if token < NUM_BYTES).decode("utf-8", errors="replace")

    @property
    def vocab_size(self) -> int:
        """256 bytes and the end of document."""
        return NUM_BYTES + 1

    def _special(self, name: str) -> int | None:
        return NUM_BYTES if name in ("eod", "eos") else None
