"""Which layers are MoE."""

import pytest

from megatron.core.configs.layer_pattern import moe_layer_pattern
from megatron.core.errors import ConfigError


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        (1, [True, True, True, True, True]),
        (2, [True, False, True, False, True]),
        (3, [True, False, False, True, False]),
        (9, [True, False, False, False, False]),
        ([0, 1, 1, 0, 1], [False, True, True, False, True]),
    ],
)
def test_pattern(freq, expected):
    assert moe_layer_pattern(freq, 5, 8) == expected


def test_list_of_wrong_length_names_both_numbers():
    with pytest.raises(ConfigError, match=r"moe_layer_freq has 3 entries with num_layers=5: one entry per layer"):
        moe_layer_pattern([1, 0, 1], 5, 8)


def test_other_entries_are_refused():
    with pytest.raises(ConfigError, match=r"moe_layer_freq=\[1, 2\]: entries are 0 or 1, not 2"):
        moe_layer_pattern([1, 2], 2, 8)


def test_frequency_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"moe_layer_freq=0: .*1 or more"):
        moe_layer_pattern(0, 2, 8)


def test_without_experts_no_layer_is_moe():
    assert moe_layer_pattern(1, 3, None) == [False, False, False]
