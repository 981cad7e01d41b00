"""Flat ranges as boxes: literal cases, and every range of some tensors."""

import pytest
import torch

from megatron.core.dist_checkpointing import boxes_of_range


def test_range_over_three_rows_is_three_boxes():
    assert boxes_of_range((3, 4), 2, 11) == [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]


def test_range_inside_a_row_is_one_box():
    assert boxes_of_range((3, 4), 5, 7) == [((1, 1), (1, 2))]


def test_whole_rows_are_one_box():
    assert boxes_of_range((3, 4), 4, 12) == [((1, 0), (2, 4))]


def test_vector_and_empty_range():
    assert boxes_of_range((9,), 3, 9) == [((3,), (6,))]
    assert boxes_of_range((3, 4), 5, 5) == []


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_hold_exactly_the_range_in_order(shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for begin in range(tensor.numel()):
        for end in range(begin + 1, tensor.numel() + 1):
            boxes = boxes_of_range(shape, begin, end)
            read = [
                tensor[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].flatten()
                for offset, size in boxes
            ]
            assert torch.cat(read).tolist() == list(range(begin, end))
            assert len(boxes) <= 2 * len(shape) - 1
