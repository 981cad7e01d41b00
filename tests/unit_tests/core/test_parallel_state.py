"""Process groups in real gloo worlds."""

from dataclasses import fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.groups import group_rank, group_size
from tests.common.pool import RankErrors


def groups_of_tp2_ep2():
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return {f.name: dist.get_process_group_ranks(getattr(groups, f.name)) for f in fields(groups)}


def getters_of_ep2():
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    return {
        "dp": (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()),
        "dp_cp": (parallel_state.get_data_parallel_rank(with_context_parallel=True),),
        "ep": (parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size()),
        "edp": (parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()),
        "tp": (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
        "stage": (parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()),
        "src": (parallel_state.get_data_parallel_src_rank(), parallel_state.get_tensor_model_parallel_src_rank()),
    }


def neighbours_of_pp4():
    parallel_state.initialize_model_parallel(1, 4)
    return (
        parallel_state.get_pipeline_model_parallel_prev_rank(),
        parallel_state.get_pipeline_model_parallel_next_rank(),
        parallel_state.is_rank_in_embedding_group(),
        parallel_state.is_rank_in_position_embedding_group(),
    )


def ends_of_pp2(num_chunks):
    """(first, last) of the rank, then of each chunk."""
    parallel_state.initialize_model_parallel(1, 2, num_chunks)
    ends = (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
    chunks = [None] if num_chunks is None else range(num_chunks)
    of_chunks = [[is_end(ignore_virtual=False, vp_stage=chunk) for is_end in ends] for chunk in chunks]
    if num_chunks is not None:
        with pytest.raises(ValueError, match="vp_stage=None: each rank has 2 chunks"):
            parallel_state.is_pipeline_first_stage(ignore_virtual=False)
    return [is_end() for is_end in ends], of_chunks


def timeouts_of_all_groups():
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=17 / 60)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    found = {f.name: getattr(groups, f.name)._get_backend(torch.device("cpu")).options._timeout for f in fields(groups)}
    return len(found), set(found.values())


def tp2_in_a_world_of_three():
    parallel_state.initialize_model_parallel(2)


def sum_over_expert_groups_after_rebuild():
    parallel_state.initialize_model_parallel(2)
    parallel_state.destroy_model_parallel()
    was_initialised = parallel_state.is_initialized()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    total = torch.tensor([1 << dist.get_rank()])
    dist.all_reduce(total, group=parallel_state.get_expert_data_parallel_group())
    return was_initialised, total.item()


def initialise_twice():
    parallel_state.initialize_model_parallel()
    parallel_state.initialize_model_parallel()


def test_each_rank_holds_its_own_groups(pool):
    collected = pool.run(groups_of_tp2_ep2, world_size=4)
    assert [c["tp"] for c in collected] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [c["dp"] for c in collected] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [c["ep"] for c in collected] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [c["expt_dp"] for c in collected] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [c["expt_tp"] for c in collected] == [[0], [1], [2], [3]]
    assert [c["tp_dp_cp"] for c in collected] == [[0, 1, 2, 3]] * 4
    assert set(map(len, collected)) == {16}


def test_getters_give_rank_and_size_of_each_role(pool):
    for rank, got in enumerate(pool.run(getters_of_ep2, world_size=4)):
        assert got["dp"] == (rank, 4)
        assert got["dp_cp"] == (rank,)
        assert got["ep"] == (rank % 2, 2)
        assert got["edp"] == (rank // 2, 2)
        assert got["tp"] == (0, 1)
        assert got["stage"] == (True, True)
        assert got["src"] == (0, rank)


def test_pipeline_neighbours_wrap_around(pool):
    assert pool.run(neighbours_of_pp4, world_size=4) == [
        (3, 1, True, True),
        (0, 2, False, False),
        (1, 3, False, False),
        (2, 0, True, False),
    ]


def test_chunks_know_whether_they_are_the_ends_of_the_model(pool):
    first, last = pool.run(ends_of_pp2, 2)
    assert first == ([True, False], [[True, False], [False, False]])
    assert last == ([False, True], [[False, False], [False, True]])
    assert pool.run(ends_of_pp2, None) == [([True, False], [[True, False]]), ([False, True], [[False, True]])]


def test_every_group_has_the_given_timeout(pool):
    assert pool.run(timeouts_of_all_groups) == [(16, {timedelta(seconds=17)})] * 2


def test_world_that_tp_does_not_divide_is_refused_on_every_rank(pool):
    with pytest.raises(RankErrors, match="3 rank") as caught:
        pool.run(tp2_in_a_world_of_three, world_size=3, deadline_s=10)
    for kind, text in caught.value.errors.values():
        assert kind == "ConfigError"
        assert "world_size=3: must be a multiple of 2" in text


def test_groups_can_be_destroyed_and_built_again(pool):
    assert pool.run(sum_over_expert_groups_after_rebuild, world_size=4) == [
        (False, 0b101),
        (False, 0b1010),
        (False, 0b101),
        (False, 0b1010),
    ]


def test_second_setup_without_destroy_is_refused(pool):
    with pytest.raises(RankErrors, match="call destroy_model_parallel"):
        pool.run(initialise_twice)


def test_uninitialised_collection_is_all_none():
    parallel_state.reset()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    assert {getattr(groups, f.name) for f in fields(groups)} == {None}
    assert (group_size(groups.dp), group_rank(groups.dp)) == (1, 0)


def test_getter_before_setup_says_what_to_call():
    parallel_state.reset()
    with pytest.raises(RuntimeError, match=r"no 'dp' process group: call initialize_model_parallel"):
        parallel_state.get_data_parallel_rank()


def test_required_groups_are_checked_by_name():
    with pytest.raises(ValueError, match=r"required_pgs=\['xp'\]: no such process group"):
        ProcessGroupCollection.use_mpu_process_groups(["tp", "xp"])
