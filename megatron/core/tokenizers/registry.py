"""Build the tokenizer that the arguments ask for, and pad its vocabulary for the embedding.

A row of the table names a class by its module, so that a library is loaded only for those who ask for it, and says
which arguments the class is built from.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.tokenizers.base import MegatronTokenizer

Arguments = argparse.Namespace


@dataclass(frozen=True)
class TokenizerKind:
    """One `--tokenizer-type`."""

    module: str
    """Module below megatron.core.tokenizers."""
    class_name: str
    """Class in it."""
    arguments: Callable[[Arguments], dict[str, Any]]
    """Constructor arguments from the command line."""


def _needed(args: Arguments, name: str) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise ConfigError(
            f"{name}=None with tokenizer_type={args.tokenizer_type!r}: this tokenizer is built from it; "
            f"set --{name.replace('_', '-')}."
        )
    return value


def _model(args: Arguments) -> dict[str, Any]:
    return {"tokenizer_model": _needed(args, "tokenizer_model")}


KINDS: dict[str, TokenizerKind] = {
    "ByteTokenizer": TokenizerKind("byte", "ByteTokenizer", lambda args: {}),
    "NullTokenizer": TokenizerKind("null", "NullTokenizer", lambda args: {"vocab_size": _needed(args, "vocab_size")}),
    "GPT2BPETokenizer": TokenizerKind(
        "gpt2_bpe",
        "GPT2BPETokenizer",
        lambda args: {"vocab_file": _needed(args, "vocab_file"), "merge_file": _needed(args, "merge_file")},
    ),
    "SentencePieceTokenizer": TokenizerKind("sentencepiece", "SentencePieceTokenizer", _model),
    "GPTSentencePieceTokenizer": TokenizerKind("sentencepiece", "GPTSentencePieceTokenizer", _model),
    "Llama2Tokenizer": TokenizerKind("sentencepiece", "Llama2Tokenizer", _model),
    "HuggingFaceTokenizer": TokenizerKind(
        "huggingface",
        "HuggingFaceTokenizer",
        lambda args: {**_model(args), "trust_remote_code": getattr(args, "trust_remote_code", False)},
    ),
    "TikTokenizer": TokenizerKind(
        "tiktoken",
        "TikTokenizer",
        lambda args: {
            **_model(args),
            "pattern": getattr(args, "tiktoken_pattern", None) or "v2",
            "num_special_tokens": args.tiktoken_num_special_tokens,
            "vocab_size": getattr(args, "vocab_size", None),
        },
    ),
}


def pad_vocab_size(vocab_size: int, divisor: int, tensor_parallel_size: int, asked_for: int | None = None) -> int:
    """Return the rows of the embedding: the vocabulary rounded up to a multiple of divisor * TP, or what is asked for.

    Raises: ConfigError if the size asked for has no row for some id, or cannot be divided over TP.
    """
    if asked_for is not None:
        if asked_for < vocab_size or asked_for % tensor_parallel_size:
            raise ConfigError(
                f"padded_vocab_size={asked_for}: it must be at least the vocabulary of {vocab_size} and a multiple of "
                f"tensor_model_parallel_size={tensor_parallel_size}; raise it or leave --padded-vocab-size out."
            )
        return asked_for
    multiple = divisor * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def build_tokenizer(args: Arguments) -> MegatronTokenizer:
    """Build the tokenizer of `--tokenizer-type` and set `args.padded_vocab_size`.

    Raises: ConfigError for a type that is not there or lacks its arguments, MissingDependencyError for its library,
    DataError for its files.
    """
    kind = KINDS.get(args.tokenizer_type)
    if kind is None:
        raise ConfigError(
            f"tokenizer_type={args.tokenizer_type!r}: known are {', '.join(KINDS)}; set --tokenizer-type."
        )
    tokenizer_class = getattr(importlib.import_module(f"megatron.core.tokenizers.{kind.module}"), kind.class_name)
    tokenizer: MegatronTokenizer = tokenizer_class(**kind.arguments(args))
    args.padded_vocab_size = pad_vocab_size(
        tokenizer.vocab_size,
        args.make_vocab_size_divisible_by,
        args.tensor_model_parallel_size,
        args.padded_vocab_size,
    )
    return tokenizer
