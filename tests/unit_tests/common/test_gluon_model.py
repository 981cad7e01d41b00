"""The model of specialised warps sees waits without end, blocks at the edge and slots that are given back too early."""

import pytest
import torch

from tests.common import gluon_model
from tests.common.gluon_model import Barrier, Block, Descriptor


def test_a_wait_without_end_raises(monkeypatch):
    monkeypatch.setattr(gluon_model, "PATIENCE_SECONDS", 0.05)
    barrier = Barrier()
    barrier.init(1)
    barrier.wait(1)  # the phase before the first counts as ended
    barrier.note(1, 128)
    with pytest.raises(AssertionError, match="without end"):
        barrier.wait(0)
    barrier.note(num_bytes=-128)
    barrier.wait(0)


def test_a_block_at_the_edge_has_zeros():
    values = torch.arange(6.0).view(2, 3)
    got = Descriptor(values, [2, 3], [3, 1], [2, 4]).read([1, -1])
    assert got.tolist() == [[0.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 0.0]]


def test_products_in_flight_read_what_is_in_the_slot_when_they_end():
    left, right = (Block(torch.zeros(64 * 128, dtype=torch.uint8), torch.float32, [64, 32]) for _ in range(2))
    for block in (left, right):
        block.store(torch.ones(64, 32))
    total = gluon_model.multiply(left, right.permute((1, 0)), torch.zeros(64, 64), is_async=True)
    right.store(torch.full((64, 32), 2.0))
    assert float(gluon_model.wait_for_products(0, [total])[0, 0]) == 64.0
