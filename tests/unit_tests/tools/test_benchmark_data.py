"""What the data benchmark reads and writes; its figures are measured by running it."""

import json
import time

import pytest

from tools.benchmark import data
from tools.benchmark.result import write_result


def test_demand_is_the_median_step_of_a_log(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("".join(f" | elapsed time per iteration (ms): {value} |\n" for value in (900.0, 10.5, 20.0)))
    assert data.step_ms_of_log(str(log)) == 20.0


def test_log_without_steps_is_refused(tmp_path):
    (tmp_path / "train.log").write_text("nothing")
    with pytest.raises(SystemExit, match="it has no 'elapsed time per iteration'"):
        data.step_ms_of_log(str(tmp_path / "train.log"))


def test_result_says_what_it_depends_on(tmp_path):
    write_result(tmp_path / "new" / "x.json", {"figure": 1})
    record = json.loads((tmp_path / "new" / "x.json").read_text())
    assert set(record) == {"command", "date", "commit", "dirty", "environment", "results"}
    assert set(record["environment"]) >= {"torch", "numpy", "processor", "cores", "accelerator"}
    assert record["results"] == {"figure": 1}


def test_processor_time_counts_work_and_not_waiting():
    assert data.cpu_seconds(lambda: sum(range(10**6))) > 0
    assert data.cpu_seconds(lambda: time.sleep(0.2)) < 0.1


def test_documents_have_the_stated_size():
    lengths = data.DocumentLengths().sequence_lengths
    assert len(lengths) == 1_000_000
    assert lengths.sum(dtype="int64") >= 1_000_000_000
    assert lengths.min() >= 1
