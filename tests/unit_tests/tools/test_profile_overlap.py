"""Reports of hidden communication from a trace made by hand."""

import json

import pytest

from tools.profile_overlap import kind_of, main, read_spans, report


def kernel(name, start, duration, stream=7):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "tid": stream}


def stage(name, start, duration, stream):
    return kernel(name, start, duration, stream) | {"cat": "gpu_user_annotation"}


EVENTS = [
    stage("ProfilerStep#4", 0, 9000, stream=20),
    stage("F 0.1 layer 2 dispatch", 0, 500, stream=20),
    stage("F 0.1 layer 2 dispatch", 4000, 500, stream=20),
    kernel("ncclDevKernel_SendRecv", 3000, 50, stream=20),
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000, "tid": 1},
    kernel("ncclDevKernel_SendRecv", 100, 200, stream=20),
    kernel("ncclDevKernel_SendRecv", 2000, 100, stream=21),
    kernel("ncclDevKernel_ReduceScatter_Sum_f32", 1000, 400, stream=22),
    kernel("nvjet_gemm", 0, 250),
    kernel("nvjet_gemm", 1100, 100),
]


@pytest.mark.parametrize(
    ("name", "stage", "kind"),
    [
        ("ncclDevKernel_SendRecv", "combine", "combine"),
        ("ncclDevKernel_AllGather_RING", "dispatch", "dispatch"),
        ("vectorized_elementwise_kernel", "dispatch", "dispatch"),
        ("ncclDevKernel_SendRecv", "", "send and receive"),
        ("ncclDevKernel_AllGather_RING", "", "all-gather"),
        ("reduce_kernel", "", "symmetric memory"),
        ("void at::native::reduce_kernel<512, 1>", "", None),
        ("gemm_AllReduce_epilogue", "", None),
    ],
)
def test_kernels_are_sorted_by_name_and_stage(name, stage, kind):
    assert kind_of(name, stage) == kind


def test_report_states_time_and_hidden_share():
    lines = [line.split() for line in report(read_spans(EVENTS))]
    assert lines[1:] == [
        ["dispatch", "0.200", "75.0%"],
        ["reduce-scatter", "0.400", "25.0%"],
        ["send", "and", "receive", "0.150", "0.0%"],
        ["all", "0.750", "33.3%"],
    ]


def test_traces_are_read_from_files(tmp_path, capsys):
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps({"traceEvents": EVENTS}), encoding="utf-8")
    assert main([str(path)]) == 0
    assert "dispatch" in capsys.readouterr().out


def test_unreadable_trace_is_named(tmp_path, capsys):
    broken = tmp_path / "rank-0.json"
    broken.write_text("{}")
    assert main([str(broken)]) == 2
    assert f"{broken}: not a readable trace of --profile" in capsys.readouterr().err
