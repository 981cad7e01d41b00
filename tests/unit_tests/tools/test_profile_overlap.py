"""Reports of hidden communication from a trace made by hand."""

import json

import pytest

from tools.profile_overlap import kind_of, main, read_spans, report


def event(cat, name, start, duration, thread, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "tid": thread, "args": args}


def stage(label, start, duration):
    """On the thread that runs the schedule."""
    return event("user_annotation", label, start, duration, thread=1)


def launched(name, at, start, duration, stream=7, thread=1, call=("cuda_runtime", "cudaLaunchKernel")):
    """A kernel and the call of the host that launches it."""
    launched.count += 1
    pair = {"correlation": launched.count}
    return [event(*call, at, 2, thread, **pair), event("kernel", name, start, duration, stream, **pair)]


launched.count = 0
DRIVER = "cuda_driver", "cuLaunchKernelEx"
NCCL_RANGE = ("nccl:all_to_all", 12, 8)
EVENTS = [
    stage("ProfilerStep#4", 0, 9000),
    stage("F 0.1 layer 2 dispatch", 10, 20),
    # torch names the calls of NCCL itself, on the host and, in place of the stage, on the device.
    stage(*NCCL_RANGE),
    event("gpu_user_annotation", NCCL_RANGE[0], 100, 200, thread=20),
    *launched("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 15, 100, 200, stream=20),
    stage("B 0.0 layer 1 combine", 40, 20),
    *launched("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 45, 400, 100, stream=20, thread=2),
    stage("B 0.0 layer 1 dispatch", 70, 20),
    *launched("reduce_kernel", 75, 600, 40, stream=20, thread=2, call=DRIVER),
    stage("B 0.0 layer 1 experts", 92, 20),
    *launched("ncclDevKernel_ReduceScatter_Sum_f32", 95, 1000, 400, stream=22, thread=2),
    *launched("nvjet_gemm", 93, 0, 250),
    *launched("nvjet_gemm", 99, 1100, 100, call=DRIVER),
    *launched("ncclDevKernel_SendRecv", 130, 2000, 100, stream=21),
    event("kernel", "push_kernel", 3000, 50, 20, correlation=10**6),
    event("cpu_op", "aten::mm", 0, 9000, thread=1),
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
        ["combine", "0.100", "0.0%"],
        ["dispatch", "0.240", "62.5%"],
        ["reduce-scatter", "0.400", "25.0%"],
        ["send", "and", "receive", "0.100", "0.0%"],
        ["symmetric", "memory", "0.050", "0.0%"],
        ["all", "0.890", "28.1%"],
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
