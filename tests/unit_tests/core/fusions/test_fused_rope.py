"""Rotary embedding against multiplication by complex numbers."""

import pytest
import torch

from megatron.core.fusions.fused_rope import RotaryTables, apply_rotary
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from tests.common.small_models import normal

T = normal(6, 2, 3, 8, seed=4)


def turned_by_complex_numbers(t, turned, interleaved):
    positions = torch.arange(t.shape[0], dtype=torch.float64)
    frequencies = torch.tensor([10000.0 ** (-2 * i / turned) for i in range(turned // 2)], dtype=torch.float64)
    factors = torch.polar(torch.ones(()).double(), torch.outer(positions, frequencies))[:, None, None, :]
    if interleaved:
        real, imag = t[..., 0:turned:2], t[..., 1:turned:2]
    else:
        real, imag = t[..., : turned // 2], t[..., turned // 2 : turned]
    product = torch.complex(real, imag) * factors
    parts = torch.stack if interleaved else torch.cat
    joined = parts((product.real, product.imag), dim=-1)
    return torch.cat((joined.flatten(-2) if interleaved else joined, t[..., turned:]), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_turning_is_complex_multiplication(percent, interleaved):
    rope = RotaryEmbedding(8, percent, rotary_interleaved=interleaved)
    got = apply_rotary(T, rope.get_tables(6, torch.float64, T.device), interleaved)
    expected = turned_by_complex_numbers(T, int(8 * percent), interleaved)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_scores_depend_on_the_distance_only():
    tables = RotaryEmbedding(8).get_tables(6, torch.float64, T.device)
    query, key = (apply_rotary(x.expand(6, 1, 1, 8), tables)[:, 0, 0] for x in (T[0, 0, 0], T[1, 0, 0]))
    scores = query @ key.T
    torch.testing.assert_close(scores[5, 3], scores[2, 0], rtol=1e-12, atol=0)
    assert not torch.isclose(scores[5, 3], scores[3, 5])


def test_angles_are_exact_at_far_positions():
    # Pair 1 of 8 channels has frequency 0.1, which fp32 holds with an error of 1.5e-9: 1.5e-4 at position 100000.
    angles = RotaryEmbedding(8)(1, offset=100000)
    tables = RotaryTables.from_angles(angles, torch.float32)
    assert tables.cos[0, 0, 0, 1].item() == pytest.approx(-0.9521553682590461, abs=1e-7)
    assert tables.cos.dtype == torch.float32
