"""Largest magnitudes of matrices and lines, and their factors, from torch's own maxima."""

import math

import pytest
import torch

from megatron.core.fusions.fp8_amax import line_amaxes, line_factors, matrix_amax

ENDS = torch.tensor([16, 16, 48], dtype=torch.int32)  # the second expert has no row
NAN, INF = math.nan, math.inf


def values(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def bits(amax):
    return amax.float().view(torch.int32)


@pytest.mark.parametrize("is_shared", [False, True], ids=["each", "together"])
def test_matrices_have_the_bits_of_their_maxima(interpreted, is_shared):
    x = values(2, 70, 130)
    found = interpreted(matrix_amax, x, None, None, is_shared)
    expected = x.abs().amax(dim=(1, 2))
    assert torch.equal(found, bits(expected.amax(dim=0, keepdim=True) if is_shared else expected))


def test_infinity_stands_above_numbers_and_nan_above_it(interpreted):
    x = values(3, 8, 8)
    x[1, 2, 3], x[2, 7, 7], x[2, 0, 0] = -INF, NAN, INF
    found = interpreted(matrix_amax, x).view(torch.float32)
    assert found[0] == x[0].abs().max()
    assert found[1] == INF
    assert found[2].isnan()


def test_rows_behind_the_last_expert_count_as_zeros(interpreted):
    x = values(1, 64, 40)
    x[:, 48:] = NAN
    assert torch.equal(interpreted(matrix_amax, x, ENDS), bits(x[:, :48].abs().amax(dim=(1, 2))))
    rows, columns = interpreted(line_amaxes, x, ENDS)
    assert torch.equal(rows[:, :48], bits(x[:, :48].abs().amax(dim=2)))
    assert not rows[:, 48:].any()
    experts = [x[0, :16], x[0, 16:16], x[0, 16:48]]
    expected = [part.abs().amax(dim=0) if len(part) else torch.zeros(40) for part in experts]
    assert torch.equal(columns, bits(torch.stack([line.float() for line in expected])))


def test_known_scale_spares_the_reading(interpreted):
    found = interpreted(matrix_amax, values(1, 32, 32), None, torch.tensor(2.0))
    assert torch.equal(found, torch.zeros(1, dtype=torch.int32))
    assert interpreted(matrix_amax, values(1, 32, 32), None, torch.tensor(0.0)) > 0


def test_factors_bring_an_amax_to_the_largest_code(interpreted):
    amaxes = torch.tensor([1.0, 448.0, 3.0, 0.0, 1e-40, INF, NAN])
    factor, scale = interpreted(line_factors, bits(amaxes), 448.0)
    assert torch.equal(factor[:5], torch.tensor([448.0, 1.0, torch.tensor(448.0) / 3.0, 1.0, 2.0**126]))
    assert torch.equal(scale[:5], 1.0 / factor[:5])
    assert factor[5:].isnan().all()
    assert scale[5:].isnan().all()
