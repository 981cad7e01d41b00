"""The share of communication that is hidden: arithmetic of spans, and silence where there is no clock."""

import pytest
import torch

from megatron.core import streams
from megatron.core.pipeline_parallel.overlap.meter import OverlapMeter, hidden_share, union
from tests.common.overlapped_model import overlapped_model, run_microbatches


@pytest.fixture(autouse=True)
def _fresh_streams():
    yield
    streams.reset()


def test_spans_that_meet_are_joined():
    assert union([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0), (3.5, 3.7)]) == [(0.0, 2.0), (3.0, 4.0)]


@pytest.mark.parametrize(
    ("communication", "compute", "share"),
    [
        ([(0.0, 2.0)], [(1.0, 5.0)], 0.5),
        ([(0.0, 1.0), (2.0, 3.0)], [(0.0, 1.0)], 0.5),
        ([(0.0, 4.0), (1.0, 2.0)], [(0.0, 1.0), (0.5, 3.0)], 0.75),
        ([(0.0, 1.0)], [], 0.0),
        ([], [(0.0, 1.0)], None),
    ],
)
def test_hidden_share_counts_each_moment_once(communication, compute, share):
    assert hidden_share(communication, compute) == share


def test_without_a_clock_there_is_no_share():
    meter = OverlapMeter()
    streams.set_observer(meter)
    run_microbatches(overlapped_model(), 2)
    assert meter.take_share() is None


class FakeClock:
    """Events whose time is the number of events before."""

    def __init__(self):
        self.now = 0

    def mark(self, role):
        self.now += 1
        return FakeEvent(self.now)


class FakeEvent:
    def __init__(self, time):
        self.time = time

    def elapsed_time(self, other):
        return other.time - self.time


def test_stage_begins_behind_what_it_waits_for(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("megatron.core.pipeline_parallel.overlap.meter._mark", clock.mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    meter = OverlapMeter()
    meter.on_switch(streams.Role.COMPUTE, "F a")  # 1
    meter.on_switch(streams.Role.COMM, "F b")  # ends 2, begins 3
    meter.on_wait(streams.Role.COMM, None)  # begins 4
    meter.on_switch(streams.Role.COMPUTE, "")  # ends 5
    spans = {role: [(a.time, b.time) for a, b in pairs] for role, pairs in meter._closed.items()}
    assert spans == {streams.Role.COMPUTE: [(1, 2)], streams.Role.COMM: [(4, 5)]}
    assert meter.take_share() == 0.0
