"""Buffers of a captured step: same place, new numbers, no surprise in shape or name."""

import pytest
import torch

from megatron.core.full_iteration_graph.static_inputs import StaticInputs

CPU = torch.device("cpu")


def batch(start=0, rows=2, **more):
    tokens = torch.arange(start, start + rows * 3).view(rows, 3)
    return {"tokens": tokens, "mask": torch.ones(rows, 3), "name": "text", **more}


def test_numbers_change_and_addresses_stay():
    inputs = StaticInputs("train", [batch(), batch()], CPU)
    addresses = [view["tokens"].data_ptr() for view in inputs.batches]
    for start in (10, 20, 30):
        given = [batch(start), batch(start + 100)]
        inputs.fill(given)
        for view, item in zip(inputs.batches, given, strict=True):
            assert torch.equal(view["tokens"], item["tokens"])
            assert torch.equal(view["mask"], item["mask"])
            assert view["name"] == "text"
    assert [view["tokens"].data_ptr() for view in inputs.batches] == addresses


def test_dtypes_and_odd_sizes_do_not_disturb_each_other():
    given = [
        {"a": torch.tensor([True, False, True]), "b": torch.tensor([1.5], dtype=torch.float64), "c": torch.empty(0)}
    ]
    inputs = StaticInputs("train", given, CPU)
    inputs.fill(given)
    assert inputs.batches[0]["a"].tolist() == [True, False, True]
    assert inputs.batches[0]["b"].tolist() == [1.5]
    assert inputs.batches[0]["c"].shape == (0,)


@pytest.mark.parametrize(
    ("captured", "got", "text"),
    [
        (
            batch(),
            batch(rows=1),
            r"input 'mask': captured float32 \[2, 3\], got float32 \[1, 3\]; .*pad the last batch",
        ),
        (batch(), batch(extra=torch.zeros(1)), r"'extra': captured nothing of this name, got float32 \[1\]"),
        (batch(extra=torch.zeros(1)), batch(), r"'extra': captured float32 \[1\], got nothing of this name"),
        (batch(attention_mask=None), batch(attention_mask=torch.zeros(1)), r"'attention_mask': captured None, got"),
        (
            batch(attention_mask=torch.zeros(1)),
            batch(attention_mask=None),
            r"'attention_mask': captured float32 .* None",
        ),
        (batch(length=3), batch(length=4), r"'length': captured 3, got 4"),
    ],
    ids=["shape", "new", "gone", "none-tensor", "tensor-none", "value"],
)
def test_change_is_an_error_that_names_the_input(captured, got, text):
    inputs = StaticInputs("train", [captured], CPU)
    with pytest.raises(RuntimeError, match=r"graph 'train', .*" + text):
        inputs.fill([got])


def tokens_of(inputs):
    return [view["tokens"].flatten().tolist() for view in inputs.batches]


def test_batches_brought_ahead_are_copied_once():
    inputs, coming = StaticInputs("train", [batch()], CPU), [batch(50)]
    inputs.fill([batch(10)])
    assert tokens_of(inputs) == [[10, 11, 12, 13, 14, 15]]
    inputs.stage(coming)
    coming[0]["tokens"].zero_()  # they were copied already
    inputs.fill(coming)
    assert tokens_of(inputs) == [[50, 51, 52, 53, 54, 55]]
    inputs.fill(coming)  # not brought ahead a second time
    assert tokens_of(inputs) == [[0] * 6]


def test_batches_brought_ahead_do_not_stand_in_for_others():
    inputs, staged = StaticInputs("train", [batch(), batch()], CPU), [batch(50), batch(60)]
    inputs.fill([batch(1), batch(2)])
    inputs.stage(staged)
    inputs.fill([staged[1], staged[0]])
    assert [tokens[0] for tokens in tokens_of(inputs)] == [60, 50]
    inputs.fill(staged)
    assert [tokens[0] for tokens in tokens_of(inputs)] == [50, 60]
