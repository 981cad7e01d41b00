"""Words and shares of `--data-path` and `--split`."""

import numpy as np
import pytest

from megatron.core.datasets import splits
from megatron.core.errors import DataError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,1,2", [0.25, 0.25, 0.5]),
        ("9/1", [0.9, 0.1, 0.0]),
        ("100", [1.0, 0.0, 0.0]),
        (" .5 : 1.5 ", [0.25, 0.75, 0.0]),
        ("0, 0, 3", [0.0, 0.0, 1.0]),
    ],
)
def test_every_number_of_a_split_counts(text, expected):
    assert splits.parse_split(text) == expected


@pytest.mark.parametrize("text", ["", "all", "0,0,0", "1,2,3,4", "1.2.3", "5,-1", "nan,1,1", "a,9,1", "1e3,1"])
def test_split_without_sense_is_refused(text):
    with pytest.raises(DataError, match="one to three proportions"):
        splits.parse_split(text)


def test_split_without_width_is_none():
    assert splits.split_bookends([0.5, 0.0, 0.5]) == [(0, 0.5), None, (0.5, 1.0)]


def test_borders_round_half_to_even():
    assert splits.split_indices((0.25, 0.75), 10).tolist() == [2, 3, 4, 5, 6, 7]
    assert splits.split_indices((0.5, 1.0), 3).tolist() == [2]
    assert splits.split_indices((0.5, 1.0), 5).tolist() == [2, 3, 4]
    assert splits.split_indices((0.0, 1.0), 4).dtype == np.int32


def test_default_split_covers_every_sequence_once():
    bookends = splits.split_bookends(splits.parse_split("969, 30, 1"))
    parts = [splits.split_indices(ends, 236) for ends in bookends]
    assert [len(part) for part in parts] == [229, 7, 0]
    assert np.concatenate(parts).tolist() == list(range(236))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["0.3", "a", "7", "b"], (["a", "b"], [0.3, 7.0])),
        (["0.3", "a", "b"], (["0.3", "a", "b"], None)),
        (["a", "0.3"], (["a", "0.3"], None)),
        (["0.3", "a", "0.7"], (["0.3", "a", "0.7"], None)),
        (["1", "a", "x", "b"], (["1", "a", "x", "b"], None)),
        ([], None),
        (None, None),
    ],
)
def test_words_are_read_as_weights_only_in_whole_pairs(words, expected):
    assert splits.get_blend_from_list(words) == expected


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weight_without_sense_names_its_prefix(weight):
    with pytest.raises(DataError, match=r"weight .* of 'b' must be a finite number above zero"):
        splits.check_blend((["a", "b"], [1.0, weight]))


def test_weights_and_prefixes_come_in_equal_numbers():
    with pytest.raises(DataError, match="1 weights for 2 prefixes"):
        splits.check_blend((["a", "b"], [1.0]))


def test_empty_prefix_is_refused():
    with pytest.raises(DataError, match="at least one prefix and none empty"):
        splits.check_blend((["a", ""], None))


def test_more_datasets_than_an_index_can_name_are_refused():
    with pytest.raises(DataError, match="32767 datasets, below 32767 are possible"):
        splits.check_blend((["a"] * 32767, None))
    splits.check_blend((["a"] * 32766, None))


def test_contributions_round_up_and_builds_have_a_surplus():
    assert splits.blend_sizes([0.1, 0.9], 14) == [2, 13]
    assert [splits.with_surplus(size, 0.005) for size in (0, 1, 200, 1000)] == [0, 2, 201, 1005]
