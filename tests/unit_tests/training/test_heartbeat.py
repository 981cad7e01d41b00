"""Signs of life: who is named when a rank dies, stops, hangs or leaves with an error."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from megatron.core.errors import RankFailure
from megatron.core.utils.collectives import device_waits
from megatron.training import heartbeat
from megatron.training.heartbeat import VICTIM, Sign, is_communication_error, ranks_behind
from tests.common.broken_ranks import BEAT_S, start_broken_run
from tests.common.forked_run import wait_ranks


def sign(rank, beat=5, step=4, count=9, failure="", stage=0, is_waiting=False):
    return Sign(rank, beat=beat, step=step, count=count, failure=failure, stage=stage, is_waiting=is_waiting)


def waiting(rank, **place):
    return sign(rank, is_waiting=True, **place)


BEFORE = [sign(0, beat=1), sign(1, beat=1), sign(2, beat=1)]


@pytest.mark.parametrize(
    ("after", "named"),
    [
        pytest.param([sign(0), sign(1), sign(2)], [], id="all-at-one-place"),
        pytest.param([sign(0), sign(1, step=3, count=12), sign(2)], [1], id="earlier-step"),
        pytest.param([sign(0), sign(1, count=8), sign(2, count=7)], [1, 2], id="fewer-collectives"),
        pytest.param([sign(0), sign(1, beat=1, step=5), sign(2, count=8)], [1], id="silent-before-slow"),
        pytest.param([sign(0), sign(1, beat=1, failure=VICTIM), sign(2)], [], id="victim-that-has-left"),
        pytest.param([sign(0, count=7), sign(1, beat=1, failure="ValueError: x"), sign(2)], [1], id="own-error"),
        pytest.param([sign(0), sign(1, stage=1, count=3), sign(2, stage=2, count=5)], [], id="stages-count-apart"),
        pytest.param([waiting(0), sign(1, stage=1, count=3), waiting(2, stage=2)], [1], id="stage-that-is-waited-for"),
        pytest.param([waiting(0, count=5), sign(1, stage=1, count=3), sign(2)], [1], id="waiting-is-not-behind"),
        pytest.param([waiting(0), sign(1, stage=1, count=3), sign(2, stage=1)], [1], id="behind-in-its-stage"),
        pytest.param([waiting(0), waiting(1, stage=1), waiting(2, stage=2)], [], id="all-stages-wait"),
    ],
)
def test_ranks_behind_are_those_to_blame(after, named):
    assert [found.rank for found in ranks_behind(BEFORE, after)] == named


def test_rank_that_never_posted_is_silent():
    never = [*BEFORE[:2], Sign(2)]
    assert [found.rank for found in ranks_behind(never, [sign(0), sign(1), Sign(2)])] == [2]
    assert Sign(2).describe(0.0) == "rank 2: gave no sign of life since the start"


def test_sign_is_described_with_place_and_age():
    posted = Sign(1, 7, 3, "step", "all_to_all", "ep", 57, time=100.0)
    expected = "rank 1: step 3 (step), all_to_all over ep, collective 57, last sign of life 2.5 s ago"
    assert posted.describe(102.5) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("gloo/"), False),
    ],
)
def test_only_broken_collectives_are_communication_errors(error, expected):
    assert is_communication_error(error) is expected


def break_rank_one(how):
    def at_step(rank, step):
        if rank == 1 and step == 3:
            time.sleep(3 * BEAT_S)  # until this place has been posted
            how()

    return at_step


class LostPeer:
    def lost_peers(self):
        return "rank 0 of the expert ranks: no message in time from rank 3 in dispatch"


def test_peer_that_a_kernel_gave_up_on_is_named(monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    waiter = LostPeer()
    device_waits.add(waiter)
    beats = heartbeat.Heartbeat(dist.HashStore(), collective_timeout_s=60.0)
    with pytest.raises(RankFailure, match=r"no message in time from rank 3 in dispatch; "), beats.watch():
        raise RuntimeError("CUDA error: unspecified launch failure")
    assert beats.failure == heartbeat.VICTIM
    del waiter
    assert device_waits.lost_peers() == ""


def test_killed_rank_is_named_by_the_others(tmp_path):
    kill = break_rank_one(lambda: os.kill(os.getpid(), signal.SIGKILL))
    children = start_broken_run(tmp_path, "", 2, kill)
    first, second = wait_ranks(children, tmp_path)
    assert second.status == -signal.SIGKILL
    assert first.status == 1
    assert "RankFailure: a collective broke off (RuntimeError:" in first.output
    assert "ranks behind: 1; seen from rank 0: step 3 (step), all_reduce over dp_cp" in first.output
    assert "\n  rank 1: step 3 (step), barrier over world, collective " in first.output
    assert "Traceback" not in first.output


@pytest.mark.full
def test_stopped_rank_is_named_after_the_time_limit(tmp_path):
    stop = break_rank_one(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    children = start_broken_run(tmp_path, "--num-experts 6 --expert-model-parallel-size 3", 3, stop, timeout_s=4.0)
    deadline = time.monotonic() + 60
    while not all("RankFailure" in (tmp_path / f"rank{rank}.log").read_text() for rank in (0, 2)):
        assert time.monotonic() < deadline, "the others did not notice"
        time.sleep(0.1)
    os.kill(children[1], signal.SIGKILL)
    results = wait_ranks(children, tmp_path)
    for result in (results[0], results[2]):
        assert result.status == 1
        assert "ranks behind: 1; seen from" in result.output
        assert "no progress for" in result.output, "the warning after half of the time limit"


@pytest.mark.full
def test_rank_with_an_error_of_its_own_is_named_with_it(tmp_path):
    def fail():
        raise ValueError("a token of another world")

    results = wait_ranks(start_broken_run(tmp_path, "", 3, break_rank_one(fail)), tmp_path)
    for result in (results[0], results[2]):
        assert result.status == 1
        assert "ranks behind: 1; seen from" in result.output
        assert "it left with ValueError: a token of another world" in result.output


@pytest.mark.full
def test_rank_that_hangs_is_named_by_its_place(tmp_path):
    results = wait_ranks(
        start_broken_run(tmp_path, "", 2, break_rank_one(lambda: time.sleep(12)), timeout_s=4.0), tmp_path
    )
    assert results[0].status == 1
    assert "ranks behind: 1; seen from rank 0: step 3" in results[0].output
