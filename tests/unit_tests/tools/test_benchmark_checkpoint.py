"""The checkpoint benchmark: equal bytes on both sides, and figures that follow from the raw times."""

import json

import pytest

from tools.benchmark import checkpoint


def test_figures_are_bytes_over_the_median_time(tmp_path, capsys):
    out = tmp_path / "result.json"
    assert checkpoint.main(["--folder", str(tmp_path), "--gib", "0.03125", "--repeats", "1", "--output", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert results["bytes"] == 2**25
    for name, (seconds,) in results["raw_s"].items():
        assert results["gb_per_s"][name] == pytest.approx(2**25 / seconds / 1e9)
    assert results["ratio"]["save"] == pytest.approx(results["raw_s"]["dd_write"][0] / results["raw_s"]["save"][0])
    assert results["ratio"]["load"] == pytest.approx(results["raw_s"]["dd_read"][0] / results["raw_s"]["load"][0])
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert capsys.readouterr().out.splitlines()[1].startswith("save ")
