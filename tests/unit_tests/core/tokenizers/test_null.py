"""Numbers as ids."""

import numpy as np
import pytest

from megatron.core.errors import DataError
from megatron.core.tokenizers.null import NullTokenizer


def test_numbers_pass_through_and_the_last_id_ends_a_document():
    tokenizer = NullTokenizer(vocab_size=50)
    assert tokenizer.tokenize("3 1  4") == [3, 1, 4]
    assert tokenizer.detokenize([3, 1, 4]) == "3 1 4"
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad_or_none) == (50, 49, None)


def test_arrays_hold_the_same_ids():
    array = NullTokenizer(50).tokenize_array("3 1  4", np.dtype(np.int32))
    assert (array.dtype, array.tolist()) == (np.int32, [3, 1, 4])


@pytest.mark.parametrize("token", [50, -1, 70000])
def test_number_outside_of_the_vocabulary_is_named(token):
    with pytest.raises(DataError, match=f"the text holds token id {token}, the vocabulary has 50 ids"):
        NullTokenizer(50).tokenize_array(f"3 {token} 4", np.dtype(np.uint16))


def test_words_are_refused():
    with pytest.raises(DataError, match="its text is numbers, got 'three'"):
        NullTokenizer(50).tokenize("three")


def test_size_is_part_of_the_identity():
    assert NullTokenizer(50).unique_identifiers != NullTokenizer(51).unique_identifiers
