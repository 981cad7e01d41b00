"""Grouped linear layers on the CPU: values, empty groups, undefined rows, storage."""

import pytest
import torch

from megatron.core.fusions.fused_grouped_linear import expert_of_row, gather_bias, grouped_linear
from megatron.core.utils.stacked import pack, stacked
from tests.common.moe_layers import normal

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture
def poison():
    """Fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def parameters(count, dtype=torch.float64):
    return [torch.nn.Parameter(normal(6, 4, seed=i, dtype=dtype)) for i in range(count)]


@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 0, 0, 0], [0, 8, 0, 0], [2, 2, 2, 2]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_group_is_a_plain_product_and_empty_groups_get_zero_gradients(poison, dtype, counts):
    weights, rows = parameters(4, dtype), normal(sum(counts), 4, seed=9, dtype=dtype).requires_grad_()
    out = grouped_linear(rows, weights, torch.tensor(counts))
    grad = normal(sum(counts), 6, seed=10, dtype=dtype)
    out.backward(grad)
    begin = 0
    for weight, count in zip(weights, counts, strict=True):
        group = slice(begin, begin + count)
        assert torch.equal(out[group], rows[group] @ weight.t())
        assert torch.equal(rows.grad[group], grad[group] @ weight)
        assert torch.equal(weight.grad, grad[group].t() @ rows[group])
        begin += count


def test_accumulating_leaves_the_gradient_of_an_empty_group_alone(poison):
    weights, rows = parameters(2), normal(3, 4)
    for weight in weights:
        weight.grad = normal(6, 4, seed=3)
    grouped_linear(rows, weights, torch.tensor([3, 0])).sum().backward()
    assert torch.equal(weights[1].grad, normal(6, 4, seed=3))
    assert torch.allclose(weights[0].grad, normal(6, 4, seed=3) + rows.sum(0))


@pytest.mark.parametrize("counts", [[3, 1, 2, 2], [8]])
def test_rows_behind_the_last_group_are_never_read(poison, counts):
    weights, rows = parameters(len(counts)), normal(8, 4)
    grouped_linear(rows, weights, torch.tensor(counts)).backward(normal(8, 6, seed=1))
    expected = [weight.grad.clone() for weight in weights]
    spare, spare_grad = torch.full((32, 4), torch.nan), torch.full((32, 6), torch.nan)
    for weight in weights:
        weight.grad = None
    longer = torch.cat([rows, spare]).requires_grad_()
    out = grouped_linear(longer, weights, torch.tensor(counts))
    out.backward(torch.cat([normal(8, 6, seed=1), spare_grad]))
    assert torch.equal(out[:8], grouped_linear(rows, weights, torch.tensor(counts)))
    assert all(torch.equal(weight.grad, value) for weight, value in zip(weights, expected, strict=True))


def test_gradient_may_be_expanded():
    weights, rows = parameters(2), normal(4, 4).requires_grad_()
    grouped_linear(rows, weights, torch.tensor([1, 3])).sum().backward()
    assert torch.allclose(weights[1].grad, rows[1:].sum(0).expand(6, 4))


def test_packed_parameters_are_stacked_without_a_copy():
    weights = parameters(3)
    values = [weight.detach().clone() for weight in weights]
    assert stacked(weights).data_ptr() != weights[0].data_ptr()  # separate storages: a copy
    pack(weights)
    view = stacked([weight.detach() for weight in weights])
    assert view.data_ptr() == weights[0].data_ptr()
    assert torch.equal(view, torch.stack(values))


def test_spaced_parameters_of_one_buffer_are_stacked_without_a_copy():
    buffer = normal(200)
    parts = [buffer[i * 40 : i * 40 + 24].view(6, 4) for i in range(4)]
    view = stacked(parts)
    assert view.data_ptr() == buffer.data_ptr()
    assert torch.equal(view, torch.stack(parts))


def test_reversed_or_uneven_parameters_are_copied():
    buffer = normal(200)
    for starts in ([80, 40, 0], [0, 40, 100]):
        parts = [buffer[start : start + 24].view(6, 4) for start in starts]
        assert torch.equal(stacked(parts), torch.stack(parts))


def test_packing_leaves_parameters_independent():
    weights = parameters(3)
    pack(weights)
    with torch.no_grad():
        weights[1].zero_()
    assert torch.equal(weights[0], normal(6, 4, seed=0))
    assert torch.equal(weights[2], normal(6, 4, seed=2))


def test_expert_of_row_marks_rows_behind_the_last_group():
    assert expert_of_row(torch.tensor([2, 0, 1]), 5).tolist() == [0, 0, 2, 3, 3]


def test_bias_gradient_sums_the_rows_of_an_expert_and_skips_undefined_ones():
    biases = [torch.nn.Parameter(normal(4, seed=i)) for i in range(3)]
    experts = torch.tensor([0, 0, 2, 3])
    out = gather_bias(biases, experts)
    assert torch.equal(out[:3], torch.stack([biases[0], biases[0], biases[2]]))
    grad = normal(4, 4, seed=5)
    grad[3] = torch.nan
    out.backward(grad)
    expected = [grad[0] + grad[1], torch.zeros(4), grad[2]]
    assert all(torch.allclose(b.grad, e.double()) for b, e in zip(biases, expected, strict=True))
