"""Which parameters are updated as one, and how their moments lie."""

import torch

from megatron.core.fusions.fused_adam import AdamTensors
from megatron.core.optimizer.neighbours import join_neighbours, zeros_beside


def parts_of(sizes, gap=0):
    """AdamTensors of `sizes` elements, cut from one buffer of each kind with `gap` elements between."""
    total = sum(sizes) + gap * len(sizes)
    buffers = [torch.arange(total).float() for _ in range(4)]
    begins = [sum(sizes[:i]) + gap * i for i in range(len(sizes))]
    cut = [[buffer[b : b + n] for b, n in zip(begins, sizes, strict=True)] for buffer in buffers]
    return [AdamTensors(*tensors, step=torch.tensor(1.0), rounded=None) for tensors in zip(*cut, strict=True)]


def test_what_lies_end_to_end_is_joined_in_any_order():
    first, second, third = parts_of([3, 4, 5])
    (joined,) = join_neighbours([third, first, second])
    assert joined.param.tolist() == list(range(12))
    joined.exp_avg.zero_()
    assert not second.exp_avg.any()
    assert joined.step is first.step


def test_a_gap_or_another_storage_of_one_kind_parts():
    assert len(join_neighbours(parts_of([3, 4], gap=1))) == 2
    first, second = parts_of([3, 4])
    assert len(join_neighbours([first, second._replace(exp_avg=torch.zeros(4))])) == 2
    assert len(join_neighbours([first, second._replace(rounded=torch.zeros(4))])) == 2


def test_moments_lie_as_the_parameters_do():
    storage = torch.zeros(24)
    params = [storage[16:20].view(2, 2), storage[4:8], storage[8:16], torch.zeros(5)]
    moments = zeros_beside(params, lambda dtype: torch.bfloat16)
    assert [moment.shape for moment in moments] == [param.shape for param in params]
    assert [moment.storage_offset() for moment in moments] == [12, 0, 4, 0]
    assert len({moment.untyped_storage().data_ptr() for moment in moments}) == 2
    assert all(moment.dtype == torch.bfloat16 and not moment.any() for moment in moments)


def test_parameters_far_apart_have_moments_of_their_own():
    storage = torch.zeros(4000)
    first, second = zeros_beside([storage[:4], storage[3000:]], lambda dtype: dtype)
    assert (first.untyped_storage().nbytes(), second.untyped_storage().nbytes()) == (16, 4000)
