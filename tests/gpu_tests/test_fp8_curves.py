"""200 steps on the shipped text in each FP8 recipe natively: they end where bf16 ends, and where they end on a CPU.

The flags are those of the curves on a CPU (tests/functional_tests/curves.py); from the fourth step on each step is a
replay of one graph. The curves go to $OUT or the evidence.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.functional_tests.cases import command_words, prepare_corpus
from tests.functional_tests.curves import CURVES, IN_FP8, LEARNED, ends_like, recorded_curve
from tests.functional_tests.golden import collect, compare_ends, end_of
from tools.benchmark.result import ROOT, write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FILE = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks")) / "fp8-curves.json"
NATIVE = {"--device": "cuda", "--cuda-graph-impl": "full_iteration"}
FOUND = {}
"""Losses of a case by step; each runs once."""


@pytest.fixture
def curve(start, tmp_path_factory):
    def losses(name):
        if name not in FOUND:
            folder = tmp_path_factory.getbasetemp()
            paths = {"DATA_PATH": str(prepare_corpus(folder)), "DATA_CACHE_PATH": str(folder / "cache")}
            run, log = start(" ".join(command_words({**CURVES[name].model_args, **NATIVE}, paths)), model="")
            assert run.counters["graph replays"] >= 190
            FOUND[name] = collect(log, ("lm loss",))["lm loss"]
            write_result(FILE, {"ends": {each: end_of(series) for each, series in FOUND.items()}, "curves": FOUND})
        return FOUND[name]

    return losses


@pytest.mark.parametrize("name", CURVES)
def test_native_curve_ends_where_the_one_of_a_cpu_does(curve, name):
    print(f"{name}: {end_of(curve(name)):.4f}, on a CPU {end_of(recorded_curve(name)):.4f}")
    assert end_of(curve(name)) < LEARNED
    assert compare_ends({"lm loss": recorded_curve(name)}, {"lm loss": curve(name)}) == []


@pytest.mark.parametrize("name", IN_FP8)
def test_native_curve_ends_within_one_percent_of_bf16(curve, name):
    assert ends_like(curve(name), curve("bf16"))
    assert curve(name) != curve("bf16")
