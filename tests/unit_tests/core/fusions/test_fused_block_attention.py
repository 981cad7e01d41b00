"""Attention over blocks of keys, joined, against attention over all keys at once."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.fusions.fused_block_attention import FlashKernel, PlainKernel, join_block
from tests.common.small_models import normal

B, N, G, S, D = 2, 4, 2, 6, 8
SCALE = D**-0.5
CUTS = [slice(0, 2), slice(2, 3), slice(3, S)]


def inputs(dtype=torch.float64):
    """Query, key, value and the gradient of the output."""
    shapes = ((B, N, S, D), (B, G, S, D), (B, G, S, D), (B, N, S, D))
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def whole(query, key, value, hidden):
    """Softmax over all keys; a query that sees none gets 0."""
    key, value = key.repeat_interleave(N // G, 1), value.repeat_interleave(N // G, 1)
    scores = torch.exp(query @ key.mT * SCALE).masked_fill(hidden, 0.0)
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-300) @ value


def joined(kernel, query, key, value, mask):
    out = torch.zeros_like(query)
    lse = torch.full(query.shape[:3], torch.finfo(query.dtype).min, dtype=query.dtype)
    for cut in CUTS:
        hidden = None if mask is None else mask[..., cut]
        join_block(out, lse, *kernel.forward(query, key[:, :, cut], value[:, :, cut], hidden, False))
    return out, lse


MASK = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(5)) < 0.4
MASK[0, :, 2] = True
MASK[1, :, 0, :3] = True


@pytest.mark.parametrize("mask", [None, MASK], ids=["all_seen", "some_hidden"])
def test_joined_blocks_equal_attention_over_all_keys(mask):
    kernel = PlainKernel(SCALE)
    query, key, value, grad = inputs()
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected = whole(*leaves, torch.zeros(S, S, dtype=torch.bool) if mask is None else mask)
    expected.backward(grad)
    out, lse = joined(kernel, query, key, value, mask)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-12)
    to_query, shares = torch.zeros_like(query), []
    for cut in CUTS:
        hidden = None if mask is None else mask[..., cut]
        pair = (key[:, :, cut], value[:, :, cut])
        share, *rest = kernel.backward(grad, query, pair, (out, lse), hidden, False)
        to_query += share
        shares.append(rest)
    got = [to_query, *(torch.cat(parts, dim=2) for parts in zip(*shares, strict=True))]
    for leaf, gradient in zip(leaves, got, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-12)


def test_triangle_hides_later_keys():
    query, key, value, _ = inputs()
    out, _ = PlainKernel(SCALE).forward(query, key, value, None, True)
    expected = whole(query, key, value, torch.ones(S, S, dtype=torch.bool).triu(1))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def test_scores_beyond_the_range_of_fp16_do_not_overflow():
    query, key, value, grad = (tensor * 300.0 for tensor in inputs(torch.float16))
    out, lse = PlainKernel(SCALE).forward(query, key, value, None, True)
    assert float(lse.abs().max()) > torch.finfo(torch.float16).max
    gradients = PlainKernel(SCALE).backward(grad, query, (key, value), (out, lse), None, True)
    assert all(bool(tensor.isfinite().all()) for tensor in (out, *gradients))


def test_flash_kernel_calls_torch_with_shapes_that_it_takes():
    with FakeTensorMode():
        query = torch.empty(B, N, 16, 64, dtype=torch.bfloat16, device="cuda")
        pair = tuple(torch.empty(B, G, 32, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out, lse = FlashKernel(SCALE).forward(query, *pair, None, False)
        assert (out.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:3], torch.float32)
        gradients = FlashKernel(SCALE).backward(out, query, pair, (out, lse), None, False)
        assert [gradient.shape for gradient in gradients] == [query.shape, pair[0].shape, pair[1].shape]


def test_flash_kernel_takes_no_mask():
    with pytest.raises(AssertionError, match="takes no mask"):
        FlashKernel(SCALE).forward(*inputs()[:3], MASK, False)
