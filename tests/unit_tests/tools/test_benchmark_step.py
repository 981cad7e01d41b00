"""The step benchmark: slices are launch lines that parse, and a row counts only if it is honest."""

import shlex

import pytest

from megatron.training.arguments import parse_args
from tools.benchmark import step
from tools.benchmark.result import ROOT
from tools.benchmark.step import PRECISIONS, SLICES, VARIANTS, judge, read_row, reference_of

LINE = (
    " [2031-05-04 09:08:07.123456] iteration {step:8d}/      24 | consumed samples:  32 | elapsed time per iteration "
    "(ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {tflops:.1f} | lm loss: {loss:.6E} | row overflows: {over} |\n"
)
PEAK = "[Rank 0] memory (MB) | allocated: 1.0 | max allocated: 70000.0 | reserved: 2.0 | max reserved: 80000.0\n"


def log_of(overflow_at=0, loss=5.0):
    times = {1: 900.0, 2: 800.0, 3: 3000.0}
    lines = [
        LINE.format(step=step, ms=times.get(step, 100.0 + step), tflops=300.0, loss=loss, over=int(step == overflow_at))
        for step in range(1, 25)
    ]
    return "".join(lines) + PEAK


def test_warm_up_and_capture_are_not_timed():
    row = read_row(log_of())
    assert len(row["raw_ms"]) == 21
    assert row["step_ms"] == 114.0
    assert (row["peak_allocated_mb"], row["peak_reserved_mb"]) == (70000.0, 80000.0)
    assert len(row["losses"]) == 24


@pytest.mark.parametrize(
    ("log", "verdict"),
    [
        (log_of(), "counts"),
        (log_of(overflow_at=9), "timed steps were repeated"),
        (log_of(overflow_at=2), "counts"),
        (log_of(loss=5.2), "losses differ from the other run by 4.0e-02"),
        (log_of(loss=float("nan")), "a loss is not finite"),
    ],
    ids=["good", "repeated", "repeated-before", "other-loss", "nan"],
)
def test_row_counts_only_if_it_is_honest(log, verdict):
    assert judge(read_row(log), read_row(log_of())) == verdict


def test_rows_are_compared_with_the_eager_run_or_else_the_first():
    failed, graph, eager = (
        {"variant": "eager"},
        {"variant": "graph", "losses": [1.0]},
        {"variant": "eager", "losses": []},
    )
    assert reference_of([failed, graph, eager]) is eager
    assert reference_of([failed, graph]) is graph
    assert reference_of([failed]) is None


COUNTERS = "counters: {'re-runs': 14, 'graph captures': 1, 'graph replays': 12}\n"


@pytest.mark.parametrize(
    ("overflow_at", "counters", "verdict"),
    [
        (range(1, 25), COUNTERS, "counts"),
        (range(1, 9), COUNTERS, "only 5 of 21 timed steps overflowed"),
        (range(1, 25), COUNTERS.replace("captures': 1", "captures': 12"), "the graph did not survive"),
    ],
    ids=["all", "some", "captured-again"],
)
def test_row_of_overflows_counts_if_all_steps_overflow_and_the_graph_survives(overflow_at, counters, verdict):
    lines = [LINE.format(step=i, ms=100.0, tflops=300.0, loss=5.0, over=int(i in overflow_at)) for i in range(1, 25)]
    row = read_row("".join(lines) + PEAK + counters) | {"variant": "overflow"}
    assert judge(row, read_row(log_of())) == verdict


def test_rows_of_other_variants_stay_and_judge_the_new_one(tmp_path, monkeypatch):
    losses = {"eager": 5.0, "graph": 5.2}

    def launch(slice_name, flags, gpus):
        return ["bash"], log_of(loss=losses["graph" if "full_iteration" in flags else "eager"]), 1.0, 0

    monkeypatch.setattr(step, "launch", launch)
    words = ["--slice", "A", "--folder", str(tmp_path), "--variants"]
    monkeypatch.setattr(step, "EVIDENCE", tmp_path)
    assert step.main([*words, "eager"]) == 0
    assert step.main([*words, "graph"]) == 1
    losses["graph"] = 5.0
    assert step.main([*words, "graph"]) == 0
    rows = step.rows_of(tmp_path / "step-A-1gpu.json")
    assert [(row["variant"], row["verdict"]) for row in rows] == [
        ("eager", "counts, without another run beside it"),
        ("graph", "counts"),
    ]


@pytest.mark.parametrize("name", SLICES)
def test_launch_line_parses_with_every_variant_and_precision(name, monkeypatch):
    text = (ROOT / "tools" / "benchmark" / "slices" / f"{name}.sh").read_text(encoding="utf-8")
    flags = text[text.index("pretrain_gpt.py") :].split(maxsplit=1)[1].replace("\\\n", " ")
    flags = (
        flags.replace('"$GPUS"', "1").replace("$((6 * GPUS))", "6").replace("$((3 * GPUS))", "3").replace('"$@"', "")
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for more in (*VARIANTS.values(), *PRECISIONS.values()):
        args = parse_args([*shlex.split(flags), *shlex.split(more)])
        assert args.moe_router_force_load_balancing
