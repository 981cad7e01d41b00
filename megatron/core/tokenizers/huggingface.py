"""Tokenizers of the transformers library (`--tokenizer-model FOLDER_OR_NAME`)."""

from __future__ import annotations

from typing import Any

from megatron.core.errors import DataError
from megatron.core.optional_deps import require
from megatron.core.tokenizers.base import MegatronTokenizer


class HuggingFaceTokenizer(MegatronTokenizer):
    """What `AutoTokenizer` loads; its end of sequence ends a document.

    A text gets the special tokens that the tokenizer adds by itself, such as a begin of sequence.
    """

    def __init__(self, tokenizer_model: str, trust_remote_code: bool = False) -> None:
        super().__init__(tokenizer_model, trust_remote_code=trust_remote_code)
        transformers = require("transformers", "tokenizer_type='HuggingFaceTokenizer'")
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                tokenizer_model, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"tokenizer_model={tokenizer_model!r}: it cannot be loaded ({str(error).splitlines()[0]}); name a "
                "folder with tokenizer files, or a model that can be downloaded."
            ) from error

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._tokenizer(text).input_ids

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(ids)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added ones included."""
        return len(self._tokenizer)

    def _special(self, name: str) -> int | None:
        return getattr(self._tokenizer, f"{'eos' if name == 'eod' else name}_token_id", None)
