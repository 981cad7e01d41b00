"""Byte-level BPE on a vocabulary of a few merges."""

import json

import numpy as np
import pytest

from megatron.core.errors import DataError
from megatron.core.tokenizers.gpt2_bpe import GPT2BPETokenizer, printable_bytes

MERGES = ["t h", "th e", "\u0120 the", "i n", "in g", "e r"]


@pytest.fixture
def files(tmp_path):
    tokens = [*printable_bytes().values(), *("".join(merge.split()) for merge in MERGES), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: place for place, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    return str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")


def test_every_byte_has_its_own_printable_character():
    table = printable_bytes()
    assert len(set(table.values())) == 256
    assert table[0xAD] == "\u0143"
    assert (table[ord("A")], table[ord(" ")], table[0], table[255]) == ("A", "\u0120", "\u0100", "\u00ff")


def test_best_merge_comes_first(files):
    tokenizer = GPT2BPETokenizer(*files)
    ids = {
        token: place for place, token in enumerate([*printable_bytes().values(), *(m.replace(" ", "") for m in MERGES)])
    }
    assert tokenizer.tokenize("the thing") == [ids["the"], ids["\u0120"], ids["th"], ids["ing"]]
    assert tokenizer.tokenize(" the") == [ids["\u0120the"]]
    assert tokenizer.tokenize("ther") == [ids["the"], ids["r"]]


def test_words_split_at_letters_numbers_and_endings(files):
    tokenizer = GPT2BPETokenizer(*files)
    assert tokenizer._split("it's 42  \u00fcber!") == ["it", "'s", " 42", " ", " \u00fcber", "!"]


@pytest.mark.parametrize("text", ["the thing", "", "  \n\t x", "\u4f60\u597d \U0001f600 \u00e9", "it's \x00\x7f"])
def test_text_survives_the_round_trip(files, text):
    tokenizer = GPT2BPETokenizer(*files)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text  # the second time from the cache


def test_arrays_hold_the_same_ids(files):
    tokenizer = GPT2BPETokenizer(*files)
    assert tokenizer.tokenize_array("the thing", np.dtype(np.int32)).tolist() == tokenizer.tokenize("the thing")


def test_end_of_text_ends_a_document(files):
    tokenizer = GPT2BPETokenizer(*files)
    assert (tokenizer.vocab_size, tokenizer.eod) == (263, 262)
    assert tokenizer.detokenize([262]) == "<|endoftext|>"
    assert 262 not in tokenizer.tokenize("<|endoftext|>")


def test_equals_the_tokenizers_library(files):
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.ByteLevelBPETokenizer(*files)
    text = "the other thing, in the evening: 3 things'll rather be there.\n\n  The end"
    assert GPT2BPETokenizer(*files).tokenize(text) == library.encode(text).ids


@pytest.mark.parametrize(
    ("vocabulary", "merges", "message"),
    [
        ("{", None, "vocab_file=.*this is no JSON"),
        ("[1]", None, "vocab_file=.*an object of tokens with their ids"),
        (None, "t h e\n", "merge_file=.*'t h e' is no pair of tokens"),
        (None, "z z\n", r"the merge \('z', 'z'\) has no id; take both from one model"),
        ('{"t": 0}', "", "some of the 256 byte characters has no id"),
    ],
)
def test_foreign_file_is_named(files, vocabulary, merges, message):
    for path, text in zip(files, (vocabulary, merges), strict=True):
        if text is not None:
            with open(path, "w") as stream:
                stream.write(text)
    with pytest.raises(DataError, match=message):
        GPT2BPETokenizer(*files)


def test_missing_file_is_named(tmp_path, files):
    with pytest.raises(DataError, match=r"merge_file=.*gone.*cannot be read"):
        GPT2BPETokenizer(files[0], str(tmp_path / "gone"))
