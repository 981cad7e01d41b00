"""The benchmark of pipelines on a CPU: the executor alone, and a small model in one process."""

import json

import pytest

from tests.common.forked_run import start_ranks, wait_ranks
from tools.benchmark import pipeline


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_executor_alone_costs_microseconds_per_action(tmp_path):
    pipeline.main(["--out", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())["results"]["figures"]
    assert figures["actions"] == 4000
    assert 0 < figures["executor_us_per_action"] == min(figures["times_us"]) < 100


@pytest.mark.parametrize("words", [[], ["--vpp", "2"]], ids=["1f1b", "interleaved"])
def test_two_stages_of_a_small_model_report_peaks_and_overhead(tmp_path, words):
    out = tmp_path / "figures.json"

    def body():
        pipeline.main(["--size", "tiny", "--out", str(out), *words])
        return 0

    results = wait_ranks(start_ranks(2, body, tmp_path), tmp_path)
    assert [result.status for result in results] == [0, 0], results[0].output[-2000:]
    first, last = json.loads(out.read_text())["results"]["figures"]
    assert (first["in_flight"], last["in_flight"]) == ((2, 1) if not words else (5, 3))
    assert min(first["overhead_us_per_action"], last["overhead_us_per_action"]) > 0
