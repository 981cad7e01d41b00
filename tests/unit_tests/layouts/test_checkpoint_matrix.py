"""What one layout saves any other loads: weights, moments and counters exactly, and the next losses agree."""

import dataclasses
import functools
import itertools

import pytest
import torch

from tests.common.layouts import Layout
from tests.common.reference_model import GptShape
from tests.common.resharding import (
    SEQ_LENGTH,
    differences,
    join_passages,
    load_and_go_on,
    load_and_save,
    train_and_save,
)
from tests.unit_tests.layouts.cases import make_case

FIELDS = {
    "num_layers": 4,
    "num_query_groups": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
    "attention_dropout": 0.0,
}
SHAPE = GptShape(14, SEQ_LENGTH)
TIED = dataclasses.replace(SHAPE, share_embeddings_and_output_weights=True)
CASES = {
    "tied": make_case(TIED, **FIELDS, moe_layer_freq=1),
    "untied": make_case(SHAPE, **FIELDS, moe_layer_freq=[0, 1, 1, 0]),
}
WIDE = {"hidden_size": 32, "ffn_hidden_size": 32, "moe_ffn_hidden_size": 32}
FP8_CASE = make_case(
    SHAPE, **FIELDS, **WIDE, moe_layer_freq=[0, 1, 1, 1], fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=3
)
CUTS = {
    "one": Layout(),
    "ep2": Layout(dp=2, ep=2),
    "tp2_sp": Layout(tp=2, is_sequence_parallel=True),
    "pp2": Layout(pp=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "tp2_ep2_etp1": Layout(tp=2, is_sequence_parallel=True, ep=2, etp=1),
    "cp2": Layout(cp=2),
}
ZERO = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 99}
LAYOUTS = CUTS | {f"{name}_zero": dataclasses.replace(layout, **ZERO) for name, layout in CUTS.items()}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def in_dtype(name, dtype):
    return dataclasses.replace(LAYOUTS[name], dtype=dtype)


def same_arithmetic(one, other):
    return one.removesuffix("_zero") == other.removesuffix("_zero")


def save_each(pool, case, names, folder, dtype, **settings):
    """{name: joined passage} of a run in each layout."""
    passages = {}
    for name in names:
        layout = in_dtype(name, dtype)
        ranks = pool.run(train_and_save, case, layout, folder / name, settings, world_size=layout.world_size)
        passages[name] = join_passages(ranks)
    return passages


def check_loads(pool, case, saved, target, folder, dtype, **settings):
    """Load all that was `saved` into the layout `target`."""
    layout = in_dtype(target, dtype)
    sources = {name: folder / name for name in saved}
    ranks = pool.run(load_and_go_on, case, layout, sources, settings, world_size=layout.world_size, deadline_s=300.0)
    for name, before in saved.items():
        after = join_passages([rank[name] for rank in ranks])
        assert differences(before, after) == [], f"{name} -> {target}"
        if same_arithmetic(name, target):
            assert after.losses == before.losses, f"{name} -> {target}"
        else:
            assert after.losses == pytest.approx(before.losses, rel=TOLERANCE[dtype]), f"{name} -> {target}"


RING = ["one_zero", "ep2_zero", "tp2_sp", "pp2_vpp2", "tp2_ep2_etp1_zero", "cp2", "one_zero"]


@pytest.mark.parametrize(("source", "target"), list(itertools.pairwise(RING)))
def test_the_next_layout_of_a_ring_loads(pool, tmp_path, source, target):
    """Every layout is once the one that saves and once the one that loads; the sharded optimizer comes and goes."""
    saved = save_each(pool, CASES["tied"], [source], tmp_path, torch.float64)
    is_parallel = target in ("tp2_sp", "tp2_ep2_etp1_zero", "cp2")
    check_loads(pool, CASES["tied"], saved, target, tmp_path, torch.float64, ckpt_fully_parallel_load=is_parallel)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("source", ["one", "pp2"])
def test_stages_load_what_one_rank_or_stages_saved(pool, tmp_path, source, case):
    saved = save_each(pool, CASES[case], [source], tmp_path, torch.float64)
    check_loads(pool, CASES[case], saved, "pp2", tmp_path, torch.float64)


@pytest.fixture(scope="module")
def saved_by_all(pool, tmp_path_factory):
    """A function of (name of a case, dtype): what every layout has saved, {name: joined passage}, and the folder."""

    @functools.cache
    def save(case, dtype):
        folder = tmp_path_factory.mktemp(case)
        return save_each(pool, CASES[case], LAYOUTS, folder, dtype), folder

    return save


@pytest.mark.full
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_layout_loads_what_every_layout_saves(pool, saved_by_all, case, dtype, target):
    saved, folder = saved_by_all(case, dtype)
    is_parallel = [*LAYOUTS].index(target) % 2 == 1
    check_loads(pool, CASES[case], saved, target, folder, dtype, ckpt_fully_parallel_load=is_parallel)


@pytest.mark.full
@pytest.mark.parametrize("between", ["one", "ep2_zero", "tp2_ep2_etp1", "pp2_vpp2_zero", "cp2_zero"])
def test_a_detour_through_another_layout_ends_in_the_same_bits(pool, tmp_path, between):
    """Saved, loaded and saved by another layout, loaded: the run goes on as if it had not stopped."""
    case, source, other = CASES["tied"], in_dtype("tp2_sp", torch.bfloat16), in_dtype(between, torch.bfloat16)
    ranks = pool.run(train_and_save, case, source, tmp_path / "a", {}, world_size=source.world_size)
    pool.run(load_and_save, case, other, tmp_path / "a", tmp_path / "b", {}, world_size=other.world_size)
    after = pool.run(load_and_go_on, case, source, {"b": tmp_path / "b"}, {}, world_size=source.world_size)
    before, resumed = join_passages(ranks), join_passages([rank["b"] for rank in after])
    assert differences(before, resumed) == []
    assert resumed.losses == before.losses


@pytest.mark.full
@pytest.mark.parametrize("target", ["one", "ep2_zero", "tp2_ep2_etp1", "pp2_vpp2_zero", "cp2"])
def test_amax_histories_of_fp8_move_with_their_layers(pool, tmp_path, target):
    saved = save_each(pool, FP8_CASE, ["pp2_vpp2", "ep2"], tmp_path, torch.bfloat16)
    assert any(name.endswith("amax_history") for name in saved["ep2"].state)
    check_loads(pool, FP8_CASE, saved, target, tmp_path, torch.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("target", ["one", "tp2_sp", "cp2_zero"])
def test_uneven_stages_number_their_layers_like_any_other(pool, tmp_path, target):
    """A loss stage of its own, and a first stage with the embedding alone."""
    layout = Layout(pp=2, vpp=2, pipeline_layout="E|ttt|t|L")
    ranks = pool.run(train_and_save, CASES["tied"], layout, tmp_path / "uneven", {}, world_size=2)
    check_loads(pool, CASES["tied"], {"uneven": join_passages(ranks)}, target, tmp_path, torch.float64)
