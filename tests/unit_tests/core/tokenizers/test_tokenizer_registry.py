"""Building by name, and the size of the embedding."""

import argparse

import pytest

from megatron.core.errors import ConfigError, MissingDependencyError
from megatron.core.optional_deps import _attempt
from megatron.core.tokenizers import build_tokenizer, pad_vocab_size


def arguments(tokenizer_type, **values):
    defaults = {
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 1,
        "padded_vocab_size": None,
        "tiktoken_num_special_tokens": 1000,
    }
    return argparse.Namespace(tokenizer_type=tokenizer_type, **{**defaults, **values})


@pytest.mark.parametrize(("tp", "expected"), [(1, 50304), (2, 50432), (8, 51200)])
def test_vocabulary_is_padded_to_a_multiple_for_each_rank(tp, expected):
    assert pad_vocab_size(50257, 128, tp) == expected


def test_explicit_size_wins_and_must_hold_every_id():
    assert pad_vocab_size(50257, 128, 2, 50300) == 50300
    with pytest.raises(ConfigError, match="padded_vocab_size=50256: it must be at least the vocabulary of 50257"):
        pad_vocab_size(50257, 128, 1, 50256)
    with pytest.raises(ConfigError, match="a multiple of tensor_model_parallel_size=2"):
        pad_vocab_size(50257, 128, 2, 50301)


def test_building_sets_the_padded_size():
    args = arguments("ByteTokenizer", tensor_model_parallel_size=2)
    assert build_tokenizer(args).vocab_size == 257
    assert args.padded_vocab_size == 512


def test_unknown_type_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="tokenizer_type='SFTTokenizer': known are ByteTokenizer, NullTokenizer"):
        build_tokenizer(arguments("SFTTokenizer"))


@pytest.mark.parametrize(
    ("kind", "flag"),
    [("NullTokenizer", "vocab-size"), ("GPT2BPETokenizer", "vocab-file"), ("TikTokenizer", "tokenizer-model")],
)
def test_missing_argument_is_named_with_its_flag(kind, flag):
    with pytest.raises(ConfigError, match=f"this tokenizer is built from it; set --{flag}"):
        build_tokenizer(arguments(kind))


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("SentencePieceTokenizer", "sentencepiece"),
        ("HuggingFaceTokenizer", "transformers"),
        ("TikTokenizer", "tiktoken"),
    ],
)
def test_absent_library_is_named_with_the_step_that_installs_it(kind, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    _attempt.cache_clear()
    with pytest.raises(MissingDependencyError, match=rf"{kind}'.*'{package}' cannot be imported.*pip install"):
        build_tokenizer(arguments(kind, tokenizer_model="model"))
    _attempt.cache_clear()
