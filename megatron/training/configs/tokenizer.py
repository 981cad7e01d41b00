"""How text becomes token ids."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation

TokenizerType = Literal[
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
    "ByteTokenizer",
]


@dataclasses.dataclass(kw_only=True)
class TokenizerConfig(ConfigTopic):
    """Tokenizer."""

    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer; ByteTokenizer needs no file: 256 bytes and one end of document."""

    tokenizer_model: str | None = None
    """File, folder or hub name of the tokenizer."""

    vocab_file: str | None = None
    """Vocabulary of the GPT-2 BPE."""

    merge_file: str | None = None
    """Merges of the GPT-2 BPE."""

    vocab_size: int | None = None
    """Vocabulary before padding; NullTokenizer needs it."""

    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """Version of the splitting pattern of TikTokenizer."""

    tiktoken_num_special_tokens: int = 1000
    """Ids that TikTokenizer reserves."""

    trust_remote_code: bool = False
    """Run code that a hub tokenizer brings along."""

    def check(self) -> list[Violation]:
        """Each kind has the inputs that it needs."""
        found = []
        needed = {
            "NullTokenizer": "vocab_size",
            "SentencePieceTokenizer": "tokenizer_model",
            "GPTSentencePieceTokenizer": "tokenizer_model",
            "Llama2Tokenizer": "tokenizer_model",
            "HuggingFaceTokenizer": "tokenizer_model",
            "TikTokenizer": "tokenizer_model",
        }
        name = needed.get(self.tokenizer_type or "")
        if name is not None and getattr(self, name) is None:
            remedy = f"set --{name.replace('_', '-')}"
            found.append(violation(self, f"tokenizer_type {name}", "this tokenizer is built from it", remedy))
        if self.vocab_size is not None and self.vocab_size < 1:
            found.append(violation(self, "vocab_size", "at least 1", "raise --vocab-size"))
        return found
