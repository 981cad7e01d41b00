import json
from types import SimpleNamespace

import pytest

from tests.common.evidence import Recorder, fold


def report(nodeid, when="call", outcome="passed", **extra):
    return SimpleNamespace(nodeid=nodeid, when=when, outcome=outcome, skipped=outcome == "skipped", **extra)


def record(tmp_path, *reports):
    recorder = Recorder(SimpleNamespace(getoption=lambda name: "cpu"), tmp_path)
    for item in reports:
        recorder.pytest_runtest_logreport(item)
    recorder.pytest_sessionfinish()
    return json.loads((tmp_path / "docs" / "evidence" / "cpu.json").read_text())


@pytest.mark.parametrize(
    ("reports", "outcome"),
    [
        ([report("f.py::t", "setup"), report("f.py::t"), report("f.py::t", "teardown")], "passed"),
        ([report("f.py::t", "setup", "skipped")], "skipped"),
        ([report("f.py::t", "setup", "failed")], "error"),
        ([report("f.py::t"), report("f.py::t", "teardown", "failed")], "error"),
        ([report("f.py::t", "call", "failed")], "failed"),
        ([report("f.py::t", "call", "skipped", wasxfail="reason")], "xfailed"),
    ],
    ids=["passed", "skipped", "setup-fails", "teardown-fails", "failed", "xfailed"],
)
def test_record_keeps_the_worst_of_set_up_call_and_tear_down(tmp_path, reports, outcome):
    assert record(tmp_path, *reports)["outcomes"] == {"f.py::t": {"outcome": outcome, "cases": 1}}


def test_record_names_command_commit_and_environment(tmp_path):
    written = record(tmp_path)
    assert set(written) == {"command", "commit", "dirty", "date", "environment", "outcomes"}
    assert written["commit"] == "unknown"
    assert {"python", "platform", "cores", "accelerator", "torch", "numpy"} <= set(written["environment"])


def test_cases_fold_into_their_function_and_the_worst_outcome_wins():
    folded = fold({"f.py::test[a]": "passed", "f.py::test[b]": "failed", "f.py::other": "skipped"})
    assert folded == {
        "f.py::other": {"outcome": "skipped", "cases": 1},
        "f.py::test": {"outcome": "failed", "cases": 2},
    }
