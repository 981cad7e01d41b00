"""Reads and writes of operators, from their schemas."""

import pytest
import torch

from megatron.core.stream_check.op_access import access_of, tensors_in

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "reads", "writes"),
    [
        (aten.mm.default, (0, 1), ()),
        (aten.add_.Tensor, (1,), (0,)),
        (aten.cat.default, (0,), ()),
        (aten.index_put_.default, (1, 2), (0,)),
        (aten.empty_like.default, (), ()),
    ],
    ids=str,
)
def test_arguments_read_and_written(operator, reads, writes):
    access = access_of(operator)
    assert (access.reads, access.writes, access.is_view) == (reads, writes, False)


def test_result_given_by_keyword_is_written():
    assert access_of(aten.add.out).written_keywords == {"out"}


@pytest.mark.parametrize("operator", [aten.view.default, aten.transpose.int, aten.detach.default, aten.split.Tensor])
def test_views_touch_no_data(operator):
    assert access_of(operator).is_view


def test_tensors_are_found_in_nested_lists():
    a, b = torch.ones(1), torch.ones(1)
    assert [id(t) for t in tensors_in([[a], (b, 3), None])] == [id(a), id(b)]
