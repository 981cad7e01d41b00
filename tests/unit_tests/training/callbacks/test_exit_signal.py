"""SIGTERM with --exit-signal-handler on several ranks: all save and leave together, or nobody saves."""

import os
import signal
import time

import pytest

from megatron.training.checkpoint_paths import complete_iterations, read_tracker
from tests.common.broken_ranks import start_broken_run
from tests.common.forked_run import wait_ranks

HANDLER = "--exit-signal-handler --save-interval 2 --save "


def raise_at(step_to_signal, *ranks):
    def at_step(rank, step):
        if rank in ranks and step == step_to_signal:
            os.kill(os.getpid(), signal.SIGTERM)

    return at_step


@pytest.mark.parametrize(
    "ranks", [pytest.param((1,), id="one-rank"), pytest.param((0, 1), id="all-ranks", marks=pytest.mark.full)]
)
def test_signal_leads_all_ranks_to_save_at_the_same_step(tmp_path, ranks):
    save = tmp_path / "checkpoints"
    results = wait_ranks(start_broken_run(tmp_path, f"{HANDLER}{save}", 2, raise_at(3, *ranks)), tmp_path)
    assert [result.status for result in results] == [0, 0]
    assert read_tracker(save) == 3
    assert complete_iterations(save) == [2, 3]
    assert "exiting program after receiving SIGTERM" in results[0].output
    assert "'steps': 3" in results[0].output


def wait_for(text, path, deadline_s=40.0):
    end = time.monotonic() + deadline_s
    while text not in path.read_text():
        assert time.monotonic() < end, f"{text!r} did not appear in:\n{path.read_text()[-3000:]}"
        time.sleep(0.05)


def test_nobody_saves_if_a_rank_is_stopped(tmp_path):
    def at_step(rank, step):
        if rank == 1 and step == 4:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)

    save = tmp_path / "checkpoints"
    children = start_broken_run(tmp_path, f"{HANDLER}{save}", 2, at_step, agreement_s=1.0)
    for rank in range(2):
        while not (tmp_path / f"rank{rank}.log").exists():
            time.sleep(0.05)
    wait_for("iteration        3/", tmp_path / "rank1.log")
    time.sleep(1.0)
    for child in children:
        os.kill(child, signal.SIGTERM)
    wait_for("nothing is saved", tmp_path / "rank0.log")
    os.kill(children[1], signal.SIGCONT)
    results = wait_ranks(children, tmp_path)
    assert [result.status for result in results] == [1, 1]
    assert "the ranks cannot agree to exit after the signal: no progress for " in results[0].output
    assert "ranks behind: 1; seen from rank 0: step 4 (step)" in results[0].output
    assert read_tracker(save) == 2
    assert complete_iterations(save) == [2]
