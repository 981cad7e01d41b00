import json

import pytest

from tools import claims

TEST_FILE = "tests/test_x.py"
GPU_FILE = "tests/gpu_tests/test_y.py"


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "docs" / "evidence").mkdir(parents=True)
    (tmp_path / "tests" / "gpu_tests").mkdir(parents=True)
    (tmp_path / GPU_FILE).write_text("def test_a(): pass\n")
    (tmp_path / TEST_FILE).write_text("def test_a(): pass\nclass TestB:\n    def test_c(self): pass\n")
    write_claims(tmp_path, "claims: [{id: one, text: It holds., tests: ['tests/test_x.py::test_a']}]")
    return tmp_path


def write_claims(root, text):
    (root / "docs" / "claims.yaml").write_text(text)


def write_record(root, name, date, outcome, accelerator=None, dirty=False, test="test_a"):
    record = {
        "date": date,
        "commit": "0123456789abcdef",
        "dirty": dirty,
        "environment": {"accelerator": accelerator},
        "outcomes": {f"{GPU_FILE if accelerator else TEST_FILE}::{test}": {"outcome": outcome, "cases": 1}},
    }
    (root / "docs" / "evidence" / f"{name}.json").write_text(json.dumps(record))


def row(root, front="| It holds."):
    return next(line for line in claims.build(root).splitlines() if line.startswith(front))


def test_claim_without_a_record_was_never_run(checkout):
    assert row(checkout) == "| It holds. | `tests/test_x.py::test_a` | never run | no test |"


def test_newest_cpu_record_counts_and_dirty_is_marked(checkout):
    write_record(checkout, "old", "2026-01-01", "failed")
    write_record(checkout, "new", "2026-02-01", "passed", dirty=True)
    assert row(checkout).endswith("| passed 2026-02-01 0123456789+ | no test |")


def test_record_with_accelerator_is_a_gpu_run(checkout):
    write_claims(checkout, f"claims: [{{id: one, text: It holds., tests: ['{GPU_FILE}::test_a']}}]")
    write_record(checkout, "gpu", "2026-01-01", "skipped", accelerator="2 x NVIDIA H200")
    assert row(checkout).endswith("| no test | skipped 2026-01-01 0123456789 |")


def test_tests_may_have_run_in_several_records(checkout):
    tests = f"['{TEST_FILE}::test_a', '{TEST_FILE}::TestB::test_c', '{GPU_FILE}::test_a']"
    write_claims(checkout, f"claims: [{{id: one, text: It holds., tests: {tests}}}]")
    write_record(checkout, "cpu", "2026-02-01", "passed")
    assert row(checkout).endswith("| passed 2026-02-01 0123456789, 1 of 2 tests never run | never run |")
    write_record(checkout, "full", "2026-01-01", "failed", dirty=True, test="TestB::test_c")
    write_record(checkout, "gpu", "2026-03-01", "passed", accelerator="1 x NVIDIA H200")
    assert row(checkout).endswith("| failed 2026-01-01 0123456789+ | passed 2026-03-01 0123456789 |")


def test_fault_without_a_fix_says_not_yet(checkout):
    write_claims(checkout, "faults: [{id: F1, text: Runs on the wrong stream.}]")
    assert row(checkout, "| F1") == "| F1 | Runs on the wrong stream. | not yet | not yet | not yet |"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("claims: [{id: a, text: T, tests: ['tests/test_x.py::test_z']}]", "a: tests/test_x.py::test_z"),
        ("claims: [{id: a, text: T, tests: ['tests/none.py::test_a']}]", "a: tests/none.py::test_a"),
        ("claims: [{id: a, text: T, tests: []}]", "a: a claim names at least one test"),
        ("claims: [{id: a, text: T, test: x}]", "a: unknown key test"),
        ("faults: [{id: F1, text: T}, {id: F1, text: T}]", "F1: an entry needs a text and an id of its own"),
        ("faults: [{id: F1, text: T, fix: megatron/none.py}]", "F1: megatron/none.py"),
    ],
    ids=["function", "file", "no-test", "key", "twice", "fix"],
)
def test_broken_claims_are_refused(checkout, text, message):
    write_claims(checkout, text)
    with pytest.raises(claims.ClaimsError, match=message.replace(".", r"\.")):
        claims.build(checkout)


def test_record_without_environment_is_refused(checkout):
    (checkout / "docs" / "evidence" / "bad.json").write_text("{}")
    with pytest.raises(claims.ClaimsError, match=r"bad\.json: lacks 'environment'"):
        claims.build(checkout)


def test_check_fails_until_written_and_after_a_change(checkout, capsys):
    assert claims.main(["--check"], checkout) == 1
    assert claims.main([], checkout) == 0
    assert claims.main(["--check"], checkout) == 0
    write_record(checkout, "cpu", "2026-01-01", "passed")
    assert claims.main(["--check"], checkout) == 1
    assert "docs/claims.md is out of date" in capsys.readouterr().err
