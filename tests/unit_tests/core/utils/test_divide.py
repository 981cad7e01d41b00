"""Exact division."""

import pytest

from megatron.core.errors import ConfigError
from megatron.core.utils.divide import divide


def test_exact_quotient_is_an_integer():
    assert divide(12, 4) == 3


@pytest.mark.parametrize(("numerator", "denominator"), [(7, 2), (7, 0)])
def test_remainder_is_refused_with_both_numbers(numerator, denominator):
    with pytest.raises(ConfigError, match=f"{numerator} / {denominator}: must divide"):
        divide(numerator, denominator)
