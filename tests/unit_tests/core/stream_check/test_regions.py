"""Which bytes of a storage were used: parts apart do not meet, parts that overlap do."""

import pytest
import torch

from megatron.core import streams
from megatron.core.stream_check.recorder import StreamRecorder
from megatron.core.stream_check.regions import Region, covered_bytes, note_write, touched
from megatron.core.stream_check.rules import Kind
from megatron.core.streams import Role

CPU = torch.device("cpu")
GRID = torch.zeros(4, 6)


@pytest.fixture(autouse=True)
def _fresh_streams():
    yield
    streams.reset()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (GRID, (0, 96)),
        (GRID[1:3], (24, 72)),
        (GRID[:, 2], (8, 84)),
        (GRID[1:, 1:3], (28, 84)),
        (GRID.t(), (0, 96)),
        (GRID[2, 3], (60, 64)),
    ],
)
def test_bytes_reach_from_the_first_to_the_last_element(tensor, expected):
    assert covered_bytes(tensor) == expected


def test_regions_are_cut_where_parts_end_and_joined_by_writes():
    regions = [Region()]
    assert touched(regions, GRID) == slice(0, 1)
    assert touched(regions, GRID[1:2]) == slice(1, 2)
    assert [region.begin for region in regions] == [0, 24, 48]
    assert touched(regions, GRID[1:]) == slice(1, 3)
    note_write(regions, touched(regions, GRID[:2]), None)
    assert [region.begin for region in regions] == [0, 48]
    note_write(regions, touched(regions, GRID), None)
    assert len(regions) == 1


def used_by_both(ours, theirs):
    """Findings of a step in which comm adds to one part of a buffer while compute reads another."""
    buffer = torch.zeros(8, 4)
    with StreamRecorder() as recorder:
        with streams.step(CPU):
            with streams.on(Role.COMM, "reduction"):
                buffer[theirs].add_(1)
            with streams.on(Role.COMPUTE, "B 0.0 layer 1"):
                buffer[ours] + 1
        recorder.finish_step()
    return [finding.kind for finding in recorder.findings]


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        (slice(0, 4), slice(4, 8), []),
        (slice(4, 8), slice(0, 4), []),
        (slice(0, 5), slice(4, 8), [Kind.READ]),
        (slice(0, 8), slice(4, 8), [Kind.READ]),
        (slice(4, 8), slice(0, 8), [Kind.READ]),
    ],
    ids=str,
)
def test_parts_of_a_buffer_meet_only_where_they_overlap(ours, theirs, found):
    assert used_by_both(ours, theirs) == found
