"""Batches are taken by name and cut for context parallelism."""

import pytest
import torch

from megatron.training.batch import BATCH_KEYS, get_batch, slice_for_context_parallel


def item(length=8):
    return {key: torch.arange(length)[None] + 100 * i for i, key in enumerate(BATCH_KEYS)}


def test_extra_field_in_front_changes_nothing():
    plain = get_batch(iter([item()]), torch.device("cpu"))
    padded = get_batch(iter([{"dataset_id": torch.tensor([3]), **item()}]), torch.device("cpu"))
    assert list(padded) == list(BATCH_KEYS)
    assert all(torch.equal(plain[key], padded[key]) for key in BATCH_KEYS)


def test_missing_field_is_named():
    with pytest.raises(AssertionError, match=r"lack \['loss_mask'\]"):
        get_batch(iter([{k: v for k, v in item().items() if k != "loss_mask"}]), torch.device("cpu"))


@pytest.mark.parametrize(("rank", "positions"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_context_parallel_rank_keeps_one_early_and_one_late_chunk(rank, positions):
    cut = slice_for_context_parallel({"tokens": torch.arange(16).view(2, 8)}, rank, 2)
    assert cut["tokens"].tolist() == [positions, [p + 8 for p in positions]]


def test_length_that_does_not_cut_is_refused():
    with pytest.raises(AssertionError, match="length of 6 cannot be cut in 4"):
        slice_for_context_parallel({"tokens": torch.zeros(1, 6)}, 0, 2)


def test_attention_mask_of_the_loader_is_kept():
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    batch = get_batch(iter([{**item(), "attention_mask": mask}]), torch.device("cpu"))
    assert torch.equal(batch["attention_mask"], mask)


def test_context_parallel_rank_keeps_the_rows_of_the_mask_that_belong_to_its_queries():
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    cut = slice_for_context_parallel({"attention_mask": mask}, 1, 2)
    assert torch.equal(cut["attention_mask"], mask[:, :, 2:6])
