"""Multiprocessors that products leave free: inside the block, and nowhere else."""

import pytest
import torch

from megatron.core.utils.sm_reservation import leaving_sms_free

reserved = torch._C._get_sm_carveout_experimental


def test_what_is_reserved_ends_with_the_block():
    assert reserved() is None
    with leaving_sms_free(8):
        assert reserved() == 8
        with leaving_sms_free(0):
            assert reserved() == 8
        with leaving_sms_free(2):
            assert reserved() == 2
        assert reserved() == 8
    assert reserved() is None


def test_an_error_ends_it_too():
    with pytest.raises(ValueError, match="inside"), leaving_sms_free(8):
        raise ValueError("inside")
    assert reserved() is None
