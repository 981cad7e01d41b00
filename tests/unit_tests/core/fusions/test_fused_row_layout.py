"""Rows of a routing: the plain form against a loop, the kernels under the interpreter against the plain form."""

import unittest.mock

import pytest
import torch

from megatron.core.fusions import fused_row_layout
from megatron.core.fusions.fused_row_layout import (
    PADDING,
    TAIL,
    Sizes,
    kernel_layout,
    kernel_slots,
    reference_layout,
    reference_slots,
    row_layout,
)

FIELDS = ("slots", "pairs", "tokens_per_expert", "dropped_rows")


def random_ids(num_tokens, num_slots, num_experts, seed=0, keep=0.8):
    """Distinct ascending experts of each token, some slots empty."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    chosen = (
        scores.topk(num_slots, dim=1).indices.sort(dim=1).values.int() if num_tokens else scores[:, :num_slots].int()
    )
    is_kept = torch.rand(num_tokens, num_slots, generator=generator) < keep
    return (
        chosen.masked_fill(~is_kept, 1 << 20).sort(dim=1).values.where(is_kept.sort(dim=1, descending=True).values, -1)
    )


def layout_by_loop(ids, num_experts, num_rows, multiple):
    """(slots, pairs, rows of each expert, dropped), one row after the other."""
    slots, pairs, counts, dropped, row = torch.full_like(ids, -1), [], [], 0, 0
    for expert in range(num_experts):
        first = row
        for token, slot in (ids == expert).nonzero().tolist():
            if row < num_rows:
                slots[token, slot] = row
                pairs.append(token * ids.shape[1] + slot)
            else:
                dropped += 1
            row += 1
        while row % multiple:
            if row < num_rows:
                pairs.append(PADDING)
            row += 1
        counts.append(min(row, num_rows) - min(first, num_rows))
    pairs += [TAIL] * (num_rows - len(pairs))
    return slots.tolist(), pairs, counts, [dropped]


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize(("num_tokens", "num_slots", "num_experts"), [(0, 2, 4), (1, 1, 1), (3, 2, 5), (65, 4, 8)])
def test_plain_form_is_the_loop(num_tokens, num_slots, num_experts, multiple):
    ids = random_ids(num_tokens, num_slots, num_experts)
    needed = num_tokens * num_slots + num_experts * multiple
    for num_rows in (needed // multiple * multiple, needed // 3 // multiple * multiple):
        layout = reference_layout(ids, num_experts, Sizes(num_rows, multiple), True)
        found = [getattr(layout, field).tolist() for field in FIELDS]
        assert found == list(layout_by_loop(ids, num_experts, num_rows, multiple))


def test_every_pair_of_ranks_gets_the_same_room():
    layout = row_layout(torch.tensor([[0], [2], [0]]), 3, 9, 3, pads_empty=True)
    assert layout.pairs.tolist() == [0, 2, -1, -1, -1, -1, 1, -1, -1]
    assert layout.tokens_per_expert.tolist() == [3, 3, 3]


def test_rows_beyond_the_limit_are_dropped_from_the_last_experts():
    layout = row_layout(torch.tensor([[0, 1], [0, 1], [1, 2]]), 3, 4, has_tail=True)
    assert layout.slots.tolist() == [[0, 2], [1, 3], [-1, -1]]
    assert layout.tokens_per_expert.tolist() == [2, 2, 0]
    assert layout.dropped_rows.tolist() == [2]


def kernel_job(cases):
    """The kernels' answers, in small blocks of tokens and few of them at a time."""
    with unittest.mock.patch.multiple(fused_row_layout, TILE=256, PREFIX_CHUNK=2):
        return [[getattr(kernel_layout(ids, n, sizes, True), field) for field in FIELDS] for ids, n, sizes in cases]


def test_kernels_give_the_same_rows(interpreted):
    shapes = [(0, 2, 4), (1, 1, 1), (65, 4, 12), (20, 3, 20)]
    cases = [
        (random_ids(tokens, slots, experts, seed=i), experts, Sizes(rows, multiple, pads_empty))
        for i, (tokens, slots, experts) in enumerate(shapes)
        for rows, multiple, pads_empty in ((tokens * slots + 16 * experts, 16, i == 2), (tokens, 1, False))
    ]
    cases += [(torch.tensor([[0], [2], [0]]), 4, Sizes(15, 3, True)), (random_ids(30, 2, 4, keep=1.0), 4, Sizes(0, 1))]
    for case, answer in zip(cases, interpreted(kernel_job, cases), strict=True):
        layout = reference_layout(*case, True)
        for field, found in zip(FIELDS, answer, strict=True):
            assert torch.equal(found, getattr(layout, field)), (field, case)
            assert found.dtype == getattr(layout, field).dtype, field


def routing_map(ids, num_experts):
    """bool [C, n] of ids [C, K]."""
    chosen = torch.zeros(len(ids), num_experts + 1, dtype=torch.bool)
    return chosen.scatter_(1, ids.long().where(ids >= 0, num_experts), True)[:, :num_experts]


def slots_job(cases):
    return [kernel_slots(*case) for case in cases]


def test_slots_of_a_map_are_its_columns_in_ascending_order(interpreted):
    shapes = [(0, 2, 4), (1, 1, 1), (65, 4, 33), (20, 3, 700), (9, 8, 8)]
    given = [random_ids(tokens, slots, experts, seed=i) for i, (tokens, slots, experts) in enumerate(shapes)]
    cases = [(routing_map(ids, experts), slots) for ids, (_, slots, experts) in zip(given, shapes, strict=True)]
    cases[2] = (cases[2][0].t().contiguous().t(), cases[2][1])
    for case, ids, found in zip(cases, given, interpreted(slots_job, cases), strict=True):
        assert torch.equal(reference_slots(*case), ids)
        assert torch.equal(found, ids)
