"""The worker pool itself."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as rng
from tests.common.pool import RankErrors


def rank_and_argument(argument):
    return dist.get_rank(), dist.get_world_size(), argument


def sum_of_ranks():
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total


def fail_with_rank():
    raise KeyError(f"rank {dist.get_rank()} says no")


def fail_on_rank_one_before_a_collective():
    if dist.get_rank() == 1:
        raise KeyError("only rank 1")
    dist.all_reduce(torch.ones(1))


def sleep_on_rank_one_after_a_collective():
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def leave_the_world_dirty():
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    rng.set_base_seed(5)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)


def find_the_world_clean():
    return (
        parallel_state.is_initialized(),
        rng.get_base_seed(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


def process_id():
    return os.getpid()


def number_of_threads_before_building():
    count = len(os.listdir("/proc/self/task"))
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model = torch.nn.Linear(2, 2)
    model.itself = model  # a cycle, as modules have them
    model.group = parallel_state.get_expert_model_parallel_group()
    return count


def end_process():
    os._exit(7)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_job_runs_on_each_rank_of_its_world(pool, world_size):
    results = pool.run(rank_and_argument, "x", world_size=world_size)
    assert results == [(rank, world_size, "x") for rank in range(world_size)]


def test_ranks_communicate(pool):
    assert [t.item() for t in pool.run(sum_of_ranks)] == [3.0, 3.0]


def test_same_processes_serve_the_next_job(pool):
    assert pool.run(process_id) == pool.run(process_id)


def test_errors_of_all_ranks_come_back_with_traceback(pool):
    with pytest.raises(RankErrors, match="2 rank") as caught:
        pool.run(fail_with_rank)
    assert sorted(caught.value.errors) == [0, 1]
    for rank in (0, 1):
        kind, text = caught.value.errors[rank]
        assert kind == "KeyError"
        assert f"rank {rank} says no" in text
        assert "in fail_with_rank" in text


def test_error_of_one_rank_does_not_leave_its_peer_waiting(pool):
    pool.run(process_id)  # starting the workers is not part of the time
    begin = time.monotonic()
    with pytest.raises(RankErrors, match="only rank 1"):
        pool.run(fail_on_rank_one_before_a_collective)
    assert time.monotonic() - begin < 8
    assert pool.run(rank_and_argument, 1) == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.full
def test_sleeping_rank_fails_within_the_deadline_and_the_next_job_runs(pool):
    pool.run(process_id)  # starting the workers is not part of the time
    begin = time.monotonic()
    with pytest.raises(RankErrors, match="within the deadline of 2") as caught:
        pool.run(sleep_on_rank_one_after_a_collective, deadline_s=2, group_timeout_s=30)
    assert time.monotonic() - begin < 5
    assert "in sleep_on_rank_one_after_a_collective" in caught.value.errors[1][1]
    assert "allreduce_ default[0, 1]" in caught.value.errors[1][1]
    assert pool.run(rank_and_argument, 1) == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.full
def test_death_of_a_rank_is_reported_with_its_exit_code(pool):
    with pytest.raises(RankErrors, match="exit code 7"):
        pool.run(end_process)


def test_process_wide_state_is_reset_between_jobs(pool):
    pool.run(leave_the_world_dirty)
    assert pool.run(find_the_world_clean) == [(False, 1234, torch.float32, False, 1)] * 2


def spoil_the_next_group_on_rank_one():
    if dist.get_rank() == 1:
        make_group = dist.init_process_group

        def fail_once(*args, **options):
            dist.init_process_group = make_group
            raise RuntimeError("connection closed by peer")

        dist.init_process_group = fail_once


@pytest.mark.full
def test_failed_group_setup_does_not_spoil_the_next_job(pool):
    pool.run(spoil_the_next_group_on_rank_one, world_size=2)
    with pytest.raises(RankErrors, match="the default group was not made"):
        pool.run(process_id, world_size=2, group_timeout_s=2.0)
    assert pool.run(rank_and_argument, "x", world_size=2) == [(0, 2, "x"), (1, 2, "x")]


def test_groups_of_a_job_are_gone_when_the_next_one_starts(pool):
    first = pool.run(number_of_threads_before_building)
    assert [pool.run(number_of_threads_before_building) for _ in range(3)] == [first] * 3
