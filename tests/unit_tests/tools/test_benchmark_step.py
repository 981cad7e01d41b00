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


BF16 = {"variant": "graph", "precision": "bf16", "flags": "", "commit": "0123456789abcdef"}
FP8 = {**BF16, "precision": "fp8"}


@pytest.mark.parametrize(
    ("log", "verdict"),
    [
        (log_of(), "counts, losses within 0.0e+00 of graph bf16 at 0123456789"),
        (log_of(overflow_at=9), "timed steps were repeated"),
        (log_of(overflow_at=2), "counts, losses within 0.0e+00 of graph bf16 at 0123456789"),
        (log_of(loss=5.2), "losses differ by 4.0e-02 from graph bf16 at 0123456789"),
        (log_of(loss=float("nan")), "a loss is not finite"),
    ],
    ids=["good", "repeated", "repeated-before", "other-loss", "nan"],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_row_counts_only_if_it_is_honest(log, verdict, precision):
    assert judge(BF16 | read_row(log) | {"precision": precision}, BF16 | read_row(log_of())) == verdict


@pytest.mark.parametrize(
    ("losses", "precision", "off"),
    [
        ([4.0, 2.0, 1.02], "bf16", 0.02),
        ([4.0, 2.0, 1.02], "fp8", 0.02 / 7),
        ([4.04, 1.98, 1.01], "fp8", 0.01),
        ([4.08, 2.0], "bf16", 0.02),
        ([4.08, 2.0], "fp8", 0.08 / 6),
    ],
)
def test_fp8_is_judged_by_the_whole_curve_and_bf16_by_every_step(losses, precision, off):
    assert step.difference(losses, [4.0, 2.0, 1.0], precision) == pytest.approx(off)


def row_like(row, variant, num_steps=3, **changes):
    return {**row, "variant": variant, "losses": [1.0] * num_steps, **changes}


@pytest.mark.parametrize(
    ("row", "beside", "chosen"),
    [
        pytest.param(row_like(FP8, "graph"), [row_like(BF16, "eager"), row_like(BF16, "graph")], 1, id="fp8-variant"),
        pytest.param(row_like(FP8, "graph"), [row_like(FP8, "graph"), row_like(BF16, "eager")], 1, id="fp8-eager"),
        pytest.param(row_like(BF16, "overflow", 2), [row_like(BF16, "graph")], 0, id="fewer-steps"),
        pytest.param(row_like(FP8, "graph"), [row_like(BF16, "graph", flags="--lr 1")], None, id="other-flags"),
        pytest.param(row_like(FP8, "graph"), [{**BF16, "exit_code": 1}], None, id="failed"),
        pytest.param(row_like(BF16, "graph"), [row_like(BF16, "graph"), row_like(BF16, "eager")], 1, id="eager"),
        pytest.param(row_like(BF16, "graph"), [row_like(BF16, "graph"), row_like(FP8, "graph")], None, id="itself"),
        pytest.param(row_like(BF16, "drop-pad"), [row_like(BF16, "graph")], 0, id="captured"),
    ],
)
def test_rows_are_compared_with_one_that_can_be(row, beside, chosen):
    assert reference_of(row, beside) is (None if chosen is None else beside[chosen])


COUNTERS = "counters: {'re-runs': 14, 'graph captures': 1, 'graph replays': 12}\n"


@pytest.mark.parametrize(
    ("overflow_at", "counters", "verdict"),
    [
        (range(1, 25), COUNTERS, "counts, without another run beside it"),
        (range(1, 9), COUNTERS, "only 5 of 21 timed steps overflowed"),
        (range(1, 25), COUNTERS.replace("captures': 1", "captures': 12"), "the graph did not survive"),
    ],
    ids=["all", "some", "captured-again"],
)
def test_row_of_overflows_counts_if_all_steps_overflow_and_the_graph_survives(overflow_at, counters, verdict):
    lines = [LINE.format(step=i, ms=100.0, tflops=300.0, loss=5.0, over=int(i in overflow_at)) for i in range(1, 25)]
    row = BF16 | read_row("".join(lines) + PEAK + counters) | {"variant": "overflow"}
    assert judge(row, None) == verdict


def test_rows_of_other_variants_and_precisions_stay_and_judge_the_new_one(tmp_path, monkeypatch):
    losses = {"eager": 5.0, "graph": 5.2, "fp8": 5.01}

    def launch(slice_name, flags, gpus):
        kind = "fp8" if "fp8" in flags else "graph" if "full_iteration" in flags else "eager"
        return ["bash"], log_of(loss=losses[kind]), 1.0, 0

    monkeypatch.setattr(step, "launch", launch)
    monkeypatch.setattr(step, "commit", lambda: ("0123456789abcdef", False))
    monkeypatch.setattr(step, "EVIDENCE", tmp_path)
    words = ["--slice", "A", "--folder", str(tmp_path), "--variants"]
    assert step.main([*words, "eager"]) == 0
    assert step.main([*words, "graph"]) == 1
    losses["graph"] = 5.0
    assert step.main([*words, "graph"]) == 0
    assert step.main([*words, "graph", "--precisions", "fp8"]) == 0
    rows = step.rows_of(tmp_path / "step-A-1gpu.json")
    assert [(row["variant"], row["precision"], row["verdict"]) for row in rows] == [
        ("eager", "bf16", "counts, without another run beside it"),
        ("graph", "bf16", "counts, losses within 0.0e+00 of eager bf16 at 0123456789"),
        ("graph", "fp8", "counts, losses within 2.0e-03 of graph bf16 at 0123456789"),
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
