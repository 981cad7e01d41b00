"""Flat ranges of parameters that TP cuts, as boxes of the whole tensor."""

import pytest
import torch

from megatron.core.module_api.sharded_state import StackedKey
from megatron.core.param_attrs import InitSpec, ParamAttrs, set_param_attrs


def local_slice_of(full, dim, num_parts, rank):
    """The slice of TP rank 0 or 1: of each part its half."""
    return torch.cat([part.chunk(2, dim)[rank] for part in full.chunk(num_parts, dim)], dim)


@pytest.mark.parametrize(
    ("shape", "dim", "num_parts"),
    [((8, 3), 0, 1), ((8, 3), 0, 2), ((3, 8), 1, 1), ((3, 8), 1, 2), ((8,), 0, 2), ((4, 2, 3), 0, 2)],
)
@pytest.mark.parametrize("border", [0, 1, 5, 7, 12])
def test_flat_ranges_of_both_ranks_fill_the_whole_tensor(shape, dim, num_parts, border):
    full = torch.arange(torch.Size(shape).numel()).view(shape) + 1
    filled = torch.zeros(5, *shape, dtype=full.dtype)
    for rank in range(2):
        local = local_slice_of(full, dim, num_parts, rank)
        attrs = ParamAttrs(InitSpec("zeros"), dim, num_parts, partition_rank=rank, full_shape=shape)
        param = set_param_attrs(torch.nn.Parameter(local.double()), attrs)
        cut = min(border, local.numel())
        for begin, end in ((0, cut), (cut, local.numel())):
            flat = local.flatten()[begin:end]
            for box in StackedKey("w", (5,), (2,)).flat_boxes(flat, (begin, end), param):
                place = tuple(slice(o, o + s) for o, s in zip(box.global_offset, box.local_shape, strict=True))
                filled[place] += box.view()
    assert torch.equal(filled[2], full)
    assert not filled[[0, 1, 3, 4]].any()


def test_uncut_parameter_keeps_its_rows_together():
    param = set_param_attrs(torch.nn.Parameter(torch.zeros(5, 2)), ParamAttrs(InitSpec("zeros")))
    boxes = StackedKey("w").flat_boxes(torch.arange(6.0), (4, 10), param)
    assert [(box.global_offset, box.local_shape) for box in boxes] == [((2, 0), (3, 2))]
