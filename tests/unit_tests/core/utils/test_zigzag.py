"""Parts of a sequence that context-parallel ranks hold."""

import pytest
import torch

from megatron.core.utils.zigzag import own_chunks, to_natural_order, to_rank_order


@pytest.mark.parametrize(("rank", "positions"), [(0, [0, 7]), (1, [1, 6]), (2, [2, 5]), (3, [3, 4])])
def test_rank_holds_one_early_and_one_late_chunk(rank, positions):
    assert own_chunks(torch.arange(8), 0, rank, 4).tolist() == positions


def test_one_rank_holds_everything_uncut():
    whole = torch.arange(7)
    assert own_chunks(whole, 0, 0, 1) is whole


def test_other_dimensions_are_cut_as_well():
    cut = own_chunks(torch.arange(16).view(2, 8), 1, 1, 2)
    assert cut.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_in_rank_order_join_to_the_sequence_and_back(size):
    whole = torch.arange(32).view(16, 2)
    parts = torch.stack([own_chunks(whole, 0, rank, size) for rank in range(size)])
    assert torch.equal(to_natural_order(parts), whole)
    assert torch.equal(to_rank_order(whole, size), parts)


def test_length_that_does_not_cut_in_pairs_is_an_error():
    with pytest.raises(AssertionError, match="length of 12 cannot be cut in 8 equal chunks"):
        own_chunks(torch.arange(12), 0, 0, 4)
