"""Rank vocabularies of a few merges."""

import base64
import json

import pytest

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.tiktoken import TikTokenizer

pytest.importorskip("tiktoken")
TOKENS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"in", b"aB"]


@pytest.fixture
def model(tmp_path):
    rows = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(TOKENS)]
    (tmp_path / "vocab.json").write_text(json.dumps(rows))
    return str(tmp_path / "vocab.json")


def test_ids_are_ranks_behind_the_reserved_ones(model):
    tokenizer = TikTokenizer(model, num_special_tokens=10)
    assert tokenizer.tokenize("the the") == [267, 268]
    assert tokenizer.vocab_size == 271
    assert tokenizer.special_ids() == {"eod": 2, "bos": 1, "eos": 2, "unk": 0}


def test_text_survives_the_round_trip_and_reserved_ids_are_left_out(model):
    tokenizer = TikTokenizer(model, num_special_tokens=10)
    text = "the thing \u00e9 \U0001f600 </s>"
    ids = tokenizer.tokenize(text)
    assert min(ids) >= 10
    assert tokenizer.detokenize([1, *ids, 2]) == text


def test_smaller_vocabulary_keeps_the_best_ranks(model):
    tokenizer = TikTokenizer(model, num_special_tokens=10, vocab_size=267)
    assert tokenizer.tokenize("the") == [266, 10 + ord("e")]


def test_second_pattern_splits_before_a_capital(model):
    assert TikTokenizer(model, "v1", 10).tokenize("aB") == [270]
    assert TikTokenizer(model, "v2", 10).tokenize("aB") == [10 + ord("a"), 10 + ord("B")]
    assert TikTokenizer(model, "v1", 10).unique_identifiers != TikTokenizer(model, "v2", 10).unique_identifiers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_special_tokens": 2}, "tiktoken_num_special_tokens=2: <unk>, <s>, </s> need ids"),
        ({"num_special_tokens": 10, "vocab_size": 272}, "vocab_size=272 .* lie between 256 and 261"),
        ({"num_special_tokens": 10, "vocab_size": 200}, "vocab_size=200 .* lie between 256 and 261"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        TikTokenizer(model, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "must be a JSON list"), ('[{"rank": 0}]', "must be a JSON list"), ("[]", "its 0 ranks must run from 0")],
)
def test_foreign_file_is_named(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=message):
        TikTokenizer(str(tmp_path / "x.json"))
