"""The record of a benchmark says which commit it is of, also where the files came without their history."""

import json

from tools.benchmark import result


def test_a_machine_without_history_is_told_the_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "0123abc")
    result.write_result(tmp_path / "r.json", {"ms": 1.0})
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["commit"], record["dirty"], record["results"]) == ("0123abc", False, {"ms": 1.0})


def test_a_checkout_is_asked(monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setattr(result, "_git", lambda *words: {"rev-parse": "abc", "status": " M x.py"}[words[0]])
    assert result.commit() == ("abc", True)
