"""The table of kernels from a trace made by hand."""

import json

import pytest

from tools.benchmark.kernels import SHOWN, kernel_table, lines, main


def event(name, start, duration, category="kernel"):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


EVENTS = [
    event("add", 0, 100),
    event("gemm", 50, 400),
    event("add", 1000, 100),
    event("Memset (Device)", 1900, 100, "gpu_memset"),
    event("aten::add", 0, 9000, "cpu_op"),
    {"ph": "M", "name": "process_name"},
]


def test_times_and_calls_are_those_of_one_step():
    table = kernel_table(EVENTS, num_steps=2)
    rows = [(row["name"], row["ms"], row["calls"]) for row in table["kernels"]]
    assert rows == [("gemm", 0.2, 0.5), ("add", 0.1, 1.0), ("Memset (Device)", 0.05, 0.5)]
    assert [row["share"] for row in table["kernels"]] == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert [table[key] for key in ("sum_ms", "busy_ms", "span_ms", "calls")] == [0.35, 0.325, 1.0, 2.0]


def test_text_names_the_longest_and_sums_up_the_others():
    many = [event(f"kernel {number}", 0, 1000 + number) for number in range(SHOWN + 2)]
    shown = list(lines(kernel_table(many, num_steps=1)))
    assert shown[2].split()[-2:] == ["kernel", str(SHOWN + 1)]
    assert shown[-1].split() == ["2.001", "4.7%", "2", "others"]


def test_trace_is_read_from_a_file(tmp_path, capsys):
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps({"traceEvents": EVENTS}), encoding="utf-8")
    assert main([str(path)]) == 0
    assert "gemm" in capsys.readouterr().out
    path.write_text("{}", encoding="utf-8")
    assert main([str(path)]) == 2
    assert "not a readable trace" in capsys.readouterr().err
