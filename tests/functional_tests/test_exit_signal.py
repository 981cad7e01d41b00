"""SIGTERM under torchrun: sent to its workers all of it ends with 0, sent to torchrun its own code is 1; all save."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.training.checkpoint_paths import complete_iterations, read_tracker
from tests.common.broken_ranks import FLAGS
from tests.functional_tests.cases import ROOT, torchrun_words

START_LIMIT_S = 120


def start_torchrun(folder):
    """Start two ranks that train for ever, and wait for their fifth step; returns the process and its log."""
    log = folder / "run.log"
    flags = FLAGS.replace("--train-iters 500", "--train-iters 1000000")
    words = [*torchrun_words(2), "pretrain_gpt.py", *flags.split(), "--exit-signal-handler", "--save", str(folder)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
    end = time.monotonic() + START_LIMIT_S
    while "iteration        5/" not in log.read_text():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.05)
    return process, log


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.full
@pytest.mark.parametrize(("is_to_workers", "code"), [(True, 0), (False, 1)], ids=["to-workers", "to-torchrun"])
def test_all_workers_save_and_exit_with_zero(tmp_path, is_to_workers, code):
    process, log = start_torchrun(tmp_path)
    for pid in children_of(process.pid) if is_to_workers else [process.pid]:
        os.kill(pid, signal.SIGTERM)
    assert process.wait(timeout=60) == code, log.read_text()[-3000:]
    text = log.read_text()
    assert "exiting program after receiving SIGTERM" in text
    assert complete_iterations(tmp_path) == [read_tracker(tmp_path)]
    assert f"successfully saved checkpoint from iteration {read_tracker(tmp_path)}" in text
    assert "exitcode" not in text, "torchrun reports a worker that failed"
