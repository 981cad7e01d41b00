"""Angles of the rotary embedding."""

import math

import pytest
import torch

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding, scale_frequencies
from tests.common.small_models import normal, small_config


def angles(length=3, **arguments):
    return RotaryEmbedding(8, **arguments)(length)[:, 0, 0]


def test_halves_repeat_the_frequencies():
    # base 10000, 8 channels: 1, 0.1, 0.01, 0.001
    expected = torch.tensor([2.0, 0.2, 0.02, 0.002] * 2, dtype=torch.float64)
    torch.testing.assert_close(angles()[2], expected, rtol=1e-12, atol=0)


def test_interleaved_pairs_lie_side_by_side():
    expected = torch.tensor([2.0, 2.0, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002], dtype=torch.float64)
    torch.testing.assert_close(angles(rotary_interleaved=True)[2], expected, rtol=1e-12, atol=0)


def test_percent_shortens_the_turned_part():
    # 4 channels: 1, 0.01
    expected = torch.tensor([1.0, 0.01] * 2, dtype=torch.float64)
    torch.testing.assert_close(angles(rotary_percent=0.5)[1], expected, rtol=1e-12, atol=0)


def test_base():
    torch.testing.assert_close(angles(rotary_base=16)[1, :4], torch.tensor([1.0, 0.5, 0.25, 0.125]).double())


def test_interpolation_divides_positions():
    torch.testing.assert_close(angles(seq_len_interpolation_factor=4)[2], angles(length=5)[4] / 8)


def test_offset_moves_positions():
    rope = RotaryEmbedding(8)
    assert torch.equal(rope(2, offset=3), rope(5)[3:])


def test_llama3_scaling_of_three_wavelengths():
    # Trained length 8192, factor 8. Wavelengths 1000 (< 2048): kept; 10000 (> 8192): divided by 8;
    # 4096: t = (8192 / 4096 - 1) / 3 = 1/3, frequency * (2/3 / 8 + 1/3) = frequency * 5/12.
    frequencies = 2 * math.pi / torch.tensor([1000.0, 10000.0, 4096.0], dtype=torch.float64)
    factors = scale_frequencies(frequencies, 8.0) / frequencies
    torch.testing.assert_close(factors, torch.tensor([1.0, 0.125, 5 / 12], dtype=torch.float64), rtol=1e-9, atol=0)


def test_scaling_is_wired():
    scaled = RotaryEmbedding(8, rope_scaling=True, rotary_base=500000, rope_scaling_factor=8.0)
    plain = RotaryEmbedding(8, rotary_base=500000)
    assert torch.equal(scaled.inv_freq[0], plain.inv_freq[0])
    torch.testing.assert_close(scaled.inv_freq[3], plain.inv_freq[3] / 8)


def test_tables_are_made_once_per_length():
    rope = RotaryEmbedding(8)
    cpu = torch.device("cpu")
    first = rope.get_tables(4, torch.float32, cpu)
    assert rope.get_tables(4, torch.float32, cpu) is first
    assert rope.get_tables(5, torch.float32, cpu).cos.shape == (5, 1, 1, 8)


def test_upstream_function_turns_by_angles():
    t = normal(3, 1, 2, 8)
    got = apply_rotary_pos_emb(t, RotaryEmbedding(8)(3), small_config())
    assert torch.equal(got[0], t[0])
    first = t[1, 0, 0, 0] * math.cos(1.0) - t[1, 0, 0, 4] * math.sin(1.0)
    torch.testing.assert_close(got[1, 0, 0, 0], first)


def test_odd_number_of_turned_channels_is_refused():
    with pytest.raises(AssertionError, match=r"kv_channels=6, rotary_percent=0.5: channels turn in pairs"):
        RotaryEmbedding(6, rotary_percent=0.5)
