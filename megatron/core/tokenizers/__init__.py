"""Text to token ids and back; see README.md."""

from megatron.core.tokenizers.base import MegatronTokenizer
from megatron.core.tokenizers.registry import build_tokenizer, pad_vocab_size

__all__ = ["MegatronTokenizer", "build_tokenizer", "pad_vocab_size"]
