"""Rotary embedding against multiplication by complex numbers; its kernel, interpreted, against the plain form."""

import pytest
import torch

from megatron.core.fusions import fused_rope
from megatron.core.fusions.fused_rope import RotaryTables, _rotary_kernel, apply_rotary, kernel_rotary
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from tests.common.compiled import compiled_for_hopper
from tests.common.mutants import replaced
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


UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}
"""Twice the relative error of one rounding, of the largest operand: a turned channel is a sum of two products."""


def assert_turned(got, wanted, unit):
    """A turned channel [...] is off by a rounding of itself and by fp32 roundings of both summands."""
    torch.testing.assert_close(got.double(), wanted, rtol=unit, atol=8 * 2.0**-23 * float(wanted.abs().max()))


def rotary_job(cases):
    return [
        (kernel_rotary(t, tables, interleaved), kernel_rotary(t, tables, interleaved, backward=True))
        for t, tables, interleaved in cases
    ]


def kernel_cases(dtype):
    """Heads of all kinds: queries inside a QKV product, partly turned, odd widths, a transposed view, none at all."""
    mixed = normal(3, 2, 2, 5, 128, seed=1).to(dtype)
    queries = mixed[:, :, :, :3].flatten(2, 3)
    for t, turned in (
        (queries, 128),
        (queries, 32),
        (normal(6, 1, 3, 20, seed=2).to(dtype), 12),
        (normal(5, 2, 1, 6, seed=3).to(dtype), 6),
        (normal(2, 3, 8, 4, seed=4).to(dtype).permute(1, 0, 3, 2), 8),
        (normal(1, 1, 1, 2, seed=5).to(dtype), 2),
        (normal(2, 0, 4, 8, seed=5).to(dtype), 8),
    ):
        for interleaved in (False, True):
            rope = RotaryEmbedding(turned, rotary_interleaved=interleaved)
            yield t, rope.get_tables(t.shape[0], dtype, t.device), interleaved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernel_turns_there_and_back_and_rounds_once(interpreted, dtype):
    cases = list(kernel_cases(dtype))
    for (t, tables, interleaved), (there, back) in zip(cases, interpreted(rotary_job, cases), strict=True):
        assert there.dtype == back.dtype == dtype
        assert there.is_contiguous()
        wide = RotaryTables(tables.cos.double(), tables.sin.double())
        leaf = t.double().requires_grad_()
        wanted = apply_rotary(leaf, wide, interleaved)
        if t.numel():
            assert_turned(there, wanted.detach(), UNIT[dtype])
            assert_turned(back, torch.autograd.grad(wanted, leaf, t.double())[0], UNIT[dtype])


def gradient_job(t, tables, grad):
    leaf = t.clone().requires_grad_()
    with replaced(fused_rope, "uses_kernels", lambda tensor: True):
        turned = apply_rotary(leaf, tables)
        once, again = (torch.autograd.grad(turned, leaf, grad, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)
    return type(turned.grad_fn).__name__, turned.detach(), once


def test_gradients_come_from_the_kernel(interpreted):
    t, grad = T.float(), normal(*T.shape, seed=9).float()
    tables = RotaryEmbedding(8).get_tables(6, torch.float32, T.device)
    name, turned, got = interpreted(gradient_job, t, tables, grad.transpose(0, 1).contiguous().transpose(0, 1))
    leaf = t.clone().requires_grad_()
    wanted = apply_rotary(leaf, tables)
    assert "FusedRotary" in name
    torch.testing.assert_close(turned, wanted.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, leaf, grad)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_kernel_compiles_for_hopper_and_moves_16_bytes_at_a_time(interleaved):
    constants = {"heads": 16, "pairs": 64, "rest": 0, "interleaved": interleaved, "backward": True}
    ptx = compiled_for_hopper(_rotary_kernel, constants | {"interpreted": False}, {})
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx
