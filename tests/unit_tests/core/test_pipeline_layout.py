"""Dealing layers out to stages; what cannot be dealt out is refused with a split that works."""

import re

import pytest

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.pipeline_layout import expand_layout, stage_layers

PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
PER_CHUNK, LAYOUT = "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def make(num_layers, **fields):
    return TransformerConfig(num_layers=num_layers, hidden_size=8, num_attention_heads=2, device="cpu", **fields)


def counts(num_layers, **fields):
    return [len(layers) for layers in stage_layers(make(num_layers, **fields))]


def problem(num_layers, **fields):
    with pytest.raises(ConfigError) as caught:
        make(num_layers, **fields)
    return str(caught.value)


def test_layers_are_numbered_in_the_order_of_the_stages():
    assert stage_layers(make(8, **{PP: 2, VPP: 2})) == [range(2), range(2, 4), range(4, 6), range(6, 8)]


@pytest.mark.parametrize(
    ("num_layers", "fields", "expected"),
    [
        (8, {}, [8]),
        (8, {PP: 4}, [2, 2, 2, 2]),
        (8, {PP: 2, VPP: 1}, [4, 4]),
        (8, {PP: 2, PER_CHUNK: 2}, [2, 2, 2, 2]),
        (8, {PP: 2, PER_CHUNK: 4}, [4, 4]),
        (7, {PP: 2, EMBEDDING: True}, [3, 4]),
        (6, {PP: 2, VPP: 2, EMBEDDING: True, LOSS: True}, [1, 2, 2, 1]),
        (8, {PP: 4, FIRST: 1, LAST: 1}, [1, 3, 3, 1]),
        (9, {PP: 2, FIRST: 3}, [3, 6]),
        (8, {PP: 2, VPP: 2, LAST: 2}, [3, 1, 3, 1]),
        (8, {PP: 2, LAYOUT: "Et*3|(tt|)*2tL"}, [3, 2, 2, 1]),
        (8, {PP: 2, LAYOUT: "E|t*8, L"}, [0, 8]),
    ],
)
def test_splits_that_divide(num_layers, fields, expected):
    assert counts(num_layers, **fields) == expected


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*6L", "Ettt|tt|tt|tt|tt|tt|tt|L"),
        ("E, t*2 | t*2, L", "Ett|ttL"),
        ("(Et|)*1t|*2tL", "Et|t||tL"),
        ("((t|)*2t)*2", "t|t|tt|t|t"),
    ],
)
def test_repetitions_are_written_out(text, stages):
    assert expand_layout(text) == stages


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ettt|tttt|L|", "it ends with the one L"),
        ("t|Ettt|ttt|tL", "it begins with the one E"),
        ("Ett|ttL", "it has 4 t for 8 layers"),
        ("Et*4|t*2|t*2L", "it has 3 stages, no multiple of the 2 ranks"),
        ("Et*4|t*4mL", "it has 1 m for 0 MTP layers"),
        ("Et*4|tdt*3L", "d is none of E"),
    ],
)
def test_layouts_that_are_wrong_say_why(layout, message):
    text = problem(8, **{PP: 2, LAYOUT: layout})
    assert message in text
    assert counts(8, **{PP: 2, LAYOUT: re.search(r"for instance '(.*)'", text)[1]})


def test_a_rank_without_layers_is_refused():
    assert "rank 1 has nothing to do" in problem(2, **{PP: 4, LAYOUT: "Et||tL|".replace("tL|", "t|L")})


@pytest.mark.parametrize(
    ("num_layers", "fields", "flags"),
    [
        (7, {PP: 2}, ""),
        (3, {PP: 4}, ""),
        (8, {PP: 2, VPP: 3}, "--num-virtual-stages-per-pipeline-rank"),
        (8, {PP: 2, PER_CHUNK: 3}, "--num-layers-per-virtual-pipeline-stage"),
        (8, {PP: 2, EMBEDDING: True}, "--account-for-embedding-in-pipeline-split"),
        (8, {PP: 4, FIRST: 3}, "--decoder-first-pipeline-num-layers"),
        (8, {PP: 2, VPP: 2, FIRST: 3}, "--num-virtual-stages-per-pipeline-rank --decoder-first-pipeline-num-layers"),
    ],
)
def test_the_alternative_that_is_named_works(num_layers, fields, flags):
    text = problem(num_layers, **fields)
    layout, instead = re.search(r"--pipeline-model-parallel-layout '([^']*)'(?: instead of (.*))?$", text).groups()
    assert (instead or "") == flags
    assert sum(counts(num_layers, **{PP: fields[PP], LAYOUT: layout})) == num_layers
    if more := re.search(r"set --num-layers (\d+)(?: or (\d+))?", text):
        assert all(counts(int(number), **fields) for number in more.groups() if number)


def test_far_too_few_layers_name_a_smaller_pipeline():
    assert problem(2, **{PP: 8}).endswith("set --num-layers 8, or --pipeline-model-parallel-size 2")
    assert counts(2, **{PP: 2}) == [1, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({PP: 2, FIRST: 3, LOSS: True}, "each says how layers are split"),
        ({PP: 2, LAYOUT: "Et*4|t*4L", LOSS: True}, "each says how layers are split"),
        ({PP: 2, LAYOUT: "Et*4|t*4L", PER_CHUNK: 2}, "each says how layers are split"),
        ({PP: 2, LAYOUT: "Et*4|t*4L", VPP: 2}, "the layout has 2 stages; give the layout alone"),
        ({PP: 2, FIRST: 2, PER_CHUNK: 2}, "each says how layers are split"),
        ({VPP: 2}, "chunks interleave over at least 2 stages"),
        ({PP: 2, PER_CHUNK: 0}, "num_layers_per_virtual_pipeline_stage=0: a chunk has layers"),
        ({FIRST: 2}, "6 layers are left for 0 equal ranks; drop the flag"),
        ({PP: 2, "microbatch_group_size_per_vp_stage": 2}, "a rank has one chunk"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(fields, message):
    assert message in problem(8, **fields)


def test_chunks_follow_from_other_settings():
    assert make(8, **{PP: 2, LAYOUT: "Et|tt|tt|tttL"}).virtual_pipeline_model_parallel_size == 2
    config = make(8, **{PP: 2, PER_CHUNK: 1})
    assert config.virtual_pipeline_model_parallel_size == 4
    assert config.origins[VPP] == "num_layers num_layers_per_virtual_pipeline_stage"
