"""Bytes as ids."""

import numpy as np
import pytest

from megatron.core.errors import DataError
from megatron.core.tokenizers.byte import ByteTokenizer


def test_ids_are_utf8_bytes_and_256_ends_a_document():
    tokenizer = ByteTokenizer()
    assert tokenizer.tokenize("A\n\u00e9") == [65, 10, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_arrays_hold_the_same_ids():
    array = ByteTokenizer().tokenize_array("A\n\u00e9", np.dtype(np.uint16))
    assert array.dtype == np.uint16
    assert array.tolist() == [65, 10, 0xC3, 0xA9]


def test_text_survives_the_round_trip():
    text = "In the beginning \u4f60\u597d \U0001f600\n"
    assert ByteTokenizer().detokenize([*ByteTokenizer().tokenize(text), 256]) == text


def test_missing_special_token_is_named():
    with pytest.raises(DataError, match="tokenizer_type='ByteTokenizer': it has no pad token"):
        _ = ByteTokenizer().pad
    assert ByteTokenizer().pad_or_none is None
    assert ByteTokenizer().special_ids() == {"eod": 256, "eos": 256}
