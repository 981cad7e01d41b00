"""Borders of documents inside a sample. `E` is the end of a document."""

import pytest
import torch

from megatron.core.datasets.masks import MaskOptions, cu_seqlens_of_parts, get_ltor_masks_and_position_ids

E = 9
ALL = MaskOptions(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True, create_attention_mask=True)
NONE = MaskOptions(False, False, False, True)


def masks(tokens, options=ALL):
    return get_ltor_masks_and_position_ids(torch.tensor(tokens), E, options)


def test_reset_begins_after_the_end_of_a_document():
    _, loss_mask, positions = masks([1, E, 2, 3, E])
    assert positions.tolist() == [0, 1, 0, 1, 2]
    assert loss_mask.tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([E, 1, 2], [0, 0, 1]), ([1, 2, E], [0, 1, 2]), ([1, E, E, 2], [0, 1, 0, 0]), ([E], [0]), ([1], [0])],
)
def test_positions_at_the_rims(tokens, expected):
    assert masks(tokens)[2].tolist() == expected


def test_end_of_a_document_at_the_rim_has_no_loss():
    assert masks([E, 1, E])[1].tolist() == [0, 1, 0]


def test_tokens_do_not_attend_to_earlier_documents():
    attention, _, _ = masks([1, E, 2, 3, E])
    visible = (~attention[0]).int().tolist()
    assert visible == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert attention.dtype == torch.bool
    assert attention.shape == (1, 5, 5)


def test_without_resets_borders_do_not_count():
    attention, loss_mask, positions = masks([1, E, 2], NONE)
    assert (~attention[0]).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert loss_mask.tolist() == [1, 1, 1]
    assert positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_each_option_acts_alone(name):
    plain = masks([1, E, 2, 3], NONE)
    alone = masks([1, E, 2, 3], MaskOptions(**{**vars(NONE), name: True}))
    changed = [not torch.equal(a, b) for a, b in zip(plain, alone, strict=True)]
    order = ["reset_attention_mask", "eod_mask_loss", "reset_position_ids"]
    assert changed == [name == option for option in order]


def test_no_mask_is_made_unless_asked_for():
    assert masks([1, E, 2], MaskOptions(True, True, True, False))[0] is None


def test_part_borders_are_filled_up_with_the_length():
    borders, longest = cu_seqlens_of_parts([2, 4, 1], 7)
    assert borders.tolist() == [0, 2, 6, 7, 7, 7, 7, 7]
    assert borders.dtype == torch.int32
    assert longest.item() == 4


def test_parts_as_many_as_tokens_fit():
    assert cu_seqlens_of_parts([1, 1, 1], 3)[0].tolist() == [0, 1, 2, 3]
