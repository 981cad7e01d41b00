"""Shares of hidden communication in a made-up trace."""

import json

import pytest

from tests.common.trace_overlap import Kernel, hidden_share, read_kernels

KERNELS = [
    Kernel("gemm", 0.0, 10.0),
    Kernel("gemm", 8.0, 12.0),
    Kernel("ncclDevKernel_ReduceScatter_Sum_f32", 6.0, 16.0),
    Kernel("ncclDevKernel_AllGather_RING", 20.0, 30.0),
    Kernel("norm", 22.0, 24.0),
]


@pytest.mark.parametrize(("name", "share"), [("ReduceScatter", 0.6), ("AllGather", 0.2)])
def test_share_is_the_time_beside_compute(name, share):
    assert hidden_share(KERNELS, name) == pytest.approx(share)


def test_absent_communication_is_an_error():
    with pytest.raises(AssertionError, match="no AllReduce among"):
        hidden_share(KERNELS, "AllReduce")


def test_only_device_kernels_are_read(tmp_path):
    path = tmp_path / "rank-0.json"
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 2.0}
    path.write_text(json.dumps({"traceEvents": [event, {**event, "cat": "cpu_op"}, {"ph": "M"}]}))
    assert read_kernels(path) == [Kernel("gemm", 1.0, 3.0)]
