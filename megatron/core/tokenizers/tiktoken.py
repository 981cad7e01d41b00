"""Vocabularies for the tiktoken library, as JSON (`--tokenizer-model FILE`).

The file is a list of {"rank": int, "token_bytes": base64}, best rank first. Ids 0 to `num_special_tokens` - 1 are
reserved: `<unk>`, `<s>`, `</s>`, the rest unused; the id of a token is its rank plus that number.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from megatron.core.errors import ConfigError, DataError
from megatron.core.optional_deps import require
from megatron.core.tokenizers.base import MegatronTokenizer, check_readable

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
DEFAULT_VOCAB_SIZE = 2**17

_ENDINGS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "v1": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _BEFORE_WORD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDINGS,
    "v2": f"{_BEFORE_WORD}{_CAPITALS}*{_SMALL}+|{_BEFORE_WORD}{_CAPITALS}+{_SMALL}*|"
    + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _ENDINGS,
}


class TikTokenizer(MegatronTokenizer):
    """BPE by rank; `</s>` ends a document. Special tokens are never read from a text."""

    def __init__(
        self, tokenizer_model: str, pattern: str = "v2", num_special_tokens: int = 1000, vocab_size: int | None = None
    ) -> None:
        super().__init__(tokenizer_model, pattern=pattern, num_special_tokens=num_special_tokens, vocab_size=vocab_size)
        library = require("tiktoken", "tokenizer_type='TikTokenizer'")
        if num_special_tokens < len(SPECIAL_TOKENS):
            raise ConfigError(
                f"tiktoken_num_special_tokens={num_special_tokens}: {', '.join(SPECIAL_TOKENS)} need ids; set at least "
                f"{len(SPECIAL_TOKENS)}."
            )
        ranks = _read_ranks(tokenizer_model)
        asked_for = min(DEFAULT_VOCAB_SIZE, len(ranks) + num_special_tokens) if vocab_size is None else vocab_size
        num_ranks = asked_for - num_special_tokens
        if not 256 <= num_ranks <= len(ranks):
            raise ConfigError(
                f"vocab_size={asked_for} with tiktoken_num_special_tokens={num_special_tokens}: their difference must "
                f"lie between 256 and {len(ranks)}, the tokens in {tokenizer_model}; change --vocab-size."
            )
        kept = {token: rank for token, rank in ranks.items() if rank < num_ranks}
        self._encoding: Any = library.Encoding(
            name=tokenizer_model, pat_str=PATTERNS[pattern], mergeable_ranks=kept, special_tokens={}
        )
        self._num_special = num_special_tokens
        self._vocab_size = asked_for

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [rank + self._num_special for rank in self._encoding.encode_ordinary(text)]

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of ids; reserved ids are left out."""
        return self._encoding.decode([token - self._num_special for token in ids if token >= self._num_special])

    @property
    def vocab_size(self) -> int:
        """Reserved ids and tokens."""
        return self._vocab_size

    def _special(self, name: str) -> int | None:
        return {"unk": 0, "bos": 1, "eos": 2, "eod": 2}.get(name)


def _read_ranks(path: str) -> dict[bytes, int]:
    """Read the ranks of all tokens."""
    check_readable("tokenizer_model", path)
    try:
        with open(path, encoding="utf-8") as stream:
            rows = json.load(stream)
        ranks = {base64.b64decode(row["token_bytes"]): int(row["rank"]) for row in rows}
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"tokenizer_model={path!r}: it must be a JSON list of rank and token_bytes ({type(error).__name__}: "
            f"{error}); "
            "name a vocabulary of this form."
        ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise DataError(
            f"tokenizer_model={path!r}: its {len(ranks)} ranks must run from 0 without a gap and cover each byte; "
            "name a complete vocabulary."
        )
    return ranks
