"""Softmax of attention scores."""

import torch

from megatron.core.fusions.fused_softmax import scale_mask_softmax


def test_scale_and_mask():
    scores = torch.tensor([[0.0, 1.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[False, False, True]])
    got = scale_mask_softmax(scores, mask, 2.0, in_fp32=True)
    # The logistic function at -2 and at 2.
    torch.testing.assert_close(
        got, torch.tensor([[0.1192029220, 0.8807970780, 0.0]], dtype=torch.float64), rtol=1e-8, atol=0
    )


def test_row_masked_everywhere_is_finite():
    got = scale_mask_softmax(torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), 1.0, in_fp32=False)
    assert got.tolist() == [[0.25, 0.25, 0.25, 0.25]]


def test_fp32_softmax_scales_before_rounding():
    # 60000 * 2 overflows fp16, so that the half-precision softmax is NaN there.
    scores = torch.tensor([[60000.0, 59968.0]], dtype=torch.float16)
    assert scale_mask_softmax(scores, None, 2.0, in_fp32=True).tolist() == [[1.0, 0.0]]
    assert scale_mask_softmax(scores, None, 2.0, in_fp32=False).isnan().all()
