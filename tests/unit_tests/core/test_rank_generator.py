"""Rank arithmetic against literals; no process is started."""

import pytest

from megatron.core.errors import ConfigError
from megatron.core.rank_generator import PP_BEFORE_DP_ORDER, ParallelSizes, RankGenerator, plan_groups


def test_tp2_cp2_dp2_pp2_gives_upstream_groups():
    groups = plan_groups(ParallelSizes(world_size=16, tp=2, cp=2, pp=2))
    assert groups["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert groups["cp"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert groups["dp_cp"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert groups["tp_cp"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups["tp_dp_cp"] == [list(range(8)), list(range(8, 16))]
    assert groups["pp"] == [[r, r + 8] for r in range(8)]
    assert groups["mp"] == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert groups["embd"] == [[r, r + 8] for r in range(8)]
    assert groups["pos_embd"] == [[r] for r in range(8)]
    assert groups["world"] == [list(range(16))]


def test_expert_groups_fold_over_tp_cp_and_dp():
    groups = plan_groups(ParallelSizes(world_size=16, tp=2, cp=2, pp=2, ep=4, etp=1))
    assert groups["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups["expt_tp"] == [[r] for r in range(16)]
    assert groups["tp_ep"] == groups["ep"]
    assert groups["tp_ep_pp"] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert groups["expt_dp"] == [[r, r + 4] for r in (0, 1, 2, 3)] + [[r, r + 4] for r in (8, 9, 10, 11)]


def test_expert_tensor_size_defaults_to_tensor_size():
    groups = plan_groups(ParallelSizes(world_size=8, tp=2, ep=2))
    assert groups["expt_tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["ep"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["tp_ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["expt_dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_ep2_dp4_splits_data_parallel_ranks():
    groups = plan_groups(ParallelSizes(world_size=4, ep=2))
    assert groups["dp"] == [[0, 1, 2, 3]]
    assert groups["ep"] == [[0, 1], [2, 3]]
    assert groups["expt_dp"] == [[0, 2], [1, 3]]


def test_expert_tensor_size_may_differ_from_tensor_size():
    groups = plan_groups(ParallelSizes(world_size=4, tp=1, etp=2))
    assert groups["tp"] == [[0], [1], [2], [3]]
    assert groups["expt_tp"] == [[0, 1], [2, 3]]
    assert groups["expt_dp"] == [[0, 2], [1, 3]]


def test_pp_before_dp_order_keeps_a_pipeline_on_neighbouring_ranks():
    groups = plan_groups(ParallelSizes(world_size=8, tp=2, pp=2, ep=1, order=PP_BEFORE_DP_ORDER))
    assert groups["pp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups["mp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["expt_dp"] == groups["dp"]
    assert groups["tp_ep_pp"] == groups["mp"]


def test_embedding_groups_of_four_stages_skip_the_middle():
    groups = plan_groups(ParallelSizes(world_size=8, pp=4))
    assert groups["pp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups["embd"] == [[0, 6], [1, 7]]
    assert groups["pos_embd"] == [[0], [1]]


def test_single_rank_is_every_group():
    groups = plan_groups(ParallelSizes(world_size=1))
    assert set(map(str, groups.values())) == {"[[0]]"}


@pytest.mark.parametrize("sizes", [(16, 2, 2, 2, 4, 1), (24, 2, 1, 3, 2, 2), (8, 1, 2, 1, 8, 1), (12, 3, 1, 2, 1, 1)])
def test_every_role_covers_the_world_once(sizes):
    world, tp, cp, pp, ep, etp = sizes
    groups = plan_groups(ParallelSizes(world_size=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp))
    for role in set(groups) - {"embd", "pos_embd"}:
        assert sorted(rank for ranks in groups[role] for rank in ranks) == list(range(world)), role


def test_rank_offset_shifts_every_rank():
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="tp-cp-ep-dp-pp", rank_offset=10)
    assert generator.get_ranks("tp") == [[10, 11], [12, 13]]
    assert generator.get_ranks("dp") == [[10, 12], [11, 13]]


REFUSED = [
    ({"world_size": 3, "tp": 2}, r"world_size=3: must be a multiple of 2 = tensor 2"),
    ({"world_size": 8, "tp": 2, "pp": 3}, r"world_size=8: must be a multiple of 6 = tensor 2 .* pipeline 3"),
    ({"world_size": 4, "ep": 3}, r"world_size=4: must be a multiple of 3 = expert tensor 1 \* expert 3"),
    ({"world_size": 8, "tp": 4, "ep": 4}, r"world_size=8: must be a multiple of 16 = expert tensor 4 \* expert 4"),
    ({"world_size": 4, "tp": 0}, r"tp=0: must be at least 1"),
    ({"world_size": 4, "order": "dp-tp-cp-ep-pp"}, r"order='dp-tp-cp-ep-pp': unknown rank order"),
    (
        {"world_size": 8, "tp": 2, "pp": 2, "ep": 2, "etp": 2, "order": PP_BEFORE_DP_ORDER},
        r"data parallel size 2 and expert data parallel size 1",
    ),
]


@pytest.mark.parametrize(("sizes", "message"), REFUSED)
def test_impossible_sizes_are_refused_with_both_numbers(sizes, message):
    with pytest.raises(ConfigError, match=message):
        ParallelSizes(**sizes)


def test_unknown_axis_is_refused_by_name():
    with pytest.raises(ConfigError, match="unknown axis 'vp'"):
        RankGenerator(tp=1, ep=1, dp=1, pp=1, cp=1, order="tp-cp-ep-dp-pp").get_ranks("vp")
