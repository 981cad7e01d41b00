"""Grouped experts and permutation on a GPU: undefined memory, host waits, repeatability."""

import pytest
import torch

from megatron.core.fusions.fused_grouped_linear import grouped_linear, uses_grouped_kernel
from megatron.core.transformer.moe.permute import build_row_order, permute, sum_rows, unpermute
from megatron.core.utils.stacked import pack
from tests.gpu_tests.test_moe_layer import build_layer, run_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HALF = {"bf16": True, "params_dtype": torch.bfloat16}


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory holds NaN."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def dirty_memory():
    """Leave freed blocks full of NaN to whoever allocates next."""
    blocks = [torch.full((1 << 16,), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    blocks += [torch.full((1 << 22,), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    del blocks


@pytest.mark.parametrize("spare", [0, 32])
@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 0, 0, 0], [0, 300, 0, 1], [64, 64, 64, 64], [40]])
def test_grouped_kernel_equals_plain_products_and_writes_zeros_for_empty_groups(poison, counts, spare):
    weights = [torch.nn.Parameter(normal(96, 64, seed=i)) for i in range(len(counts))]
    pack(weights)
    num_rows = sum(counts)
    rows = torch.cat([normal(num_rows, 64, seed=9), torch.full((spare, 64), torch.nan, device="cuda").bfloat16()])
    grad = torch.cat([normal(num_rows, 96, seed=8), torch.full((spare, 96), torch.nan, device="cuda").bfloat16()])
    rows.requires_grad_()
    assert uses_grouped_kernel(rows, 96) == (len(rows) > 0)
    dirty_memory()
    out = grouped_linear(rows, weights, torch.tensor(counts, device="cuda"))
    dirty_memory()
    out.backward(grad)
    begin = 0
    for weight, count in zip(weights, counts, strict=True):
        group = slice(begin, begin + count)
        expected = rows[group].double() @ weight.t().double()
        torch.testing.assert_close(out[group].double(), expected, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(
            rows.grad[group].double(), grad[group].double() @ weight.double(), rtol=2**-7, atol=0.1
        )
        wanted = grad[group].t().double() @ rows[group].double()
        torch.testing.assert_close(weight.grad.double(), wanted, rtol=2**-7, atol=0.1)
        assert count > 0 or not weight.grad.any()
        begin += count


@pytest.mark.parametrize("changes", [{}, {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}])
def test_a_layer_without_exchange_never_makes_the_host_wait(changes):
    layer = build_layer("cuda", **HALF, moe_aux_loss_coeff=0.01, moe_z_loss_coeff=1e-3, **changes)
    hidden, grad = normal(48, 2, 64).requires_grad_(), normal(48, 2, 64, seed=1)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            layer(hidden)[0].backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_layer_repeats_bit_for_bit():
    first, second = (run_layer(build_layer("cuda", **HALF), "cuda", torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("has_slots", [True, False])
def test_permutation_equals_the_cpu(has_slots):
    scores = torch.randn(4096, 16, generator=torch.Generator().manual_seed(2))
    routing_map = torch.zeros(4096, 16, dtype=torch.bool).scatter_(1, scores.topk(4).indices, True)
    hidden, probs = normal(4096, 256), scores.to("cuda")
    order = build_row_order(routing_map.cuda(), 16384, 4 if has_slots else None)
    cpu_order = build_row_order(routing_map, 16384)
    rows, row_probs = permute(hidden, probs, order)
    expected, expected_probs = permute(hidden.cpu(), scores, cpu_order)
    assert torch.equal(rows.cpu(), expected)
    assert torch.equal(row_probs.cpu(), expected_probs)
    back = unpermute(rows, order, torch.bfloat16)
    assert torch.equal(back.cpu(), unpermute(expected, cpu_order, torch.bfloat16))


@pytest.mark.parametrize("has_slots", [True, False])
def test_bf16_sums_are_rounded_once(has_slots):
    token_ids = torch.tensor([0, 1, 0, 1, 0, 1], device="cuda")
    slots = torch.tensor([[0, 2, 4], [1, 3, 5]], device="cuda") if has_slots else None
    rows = torch.tensor([[256.0], [1.0], [1.0], [2.0], [1.0], [3.0]], device="cuda", dtype=torch.bfloat16)
    assert sum_rows(rows, token_ids, slots, 2, torch.bfloat16).flatten().tolist() == [258, 6]
