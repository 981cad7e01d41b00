"""The checker as a program: sizes are cut down, structure is not, findings end it with 1."""

import pytest

from megatron.core.distributed.bucket_group import BucketGroup
from tools.check_streams import command_line, main

LARGE = """
    --num-layers 3 --hidden-size 4096 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0 --hidden-dropout 0 --swiglu
    --micro-batch-size 4 --global-batch-size 512 --lr 1e-4 --train-samples 1000000 --data-path
    some_text_document --save some/folder --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --moe-layer-freq [0,1,1] --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16
    --moe-grouped-gemm --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""
WORDS = LARGE.split()


def value_of(words, flag):
    last = len(words) - 1 - words[::-1].index(flag)
    return words[last + 1]


def test_sizes_are_cut_and_structure_is_kept():
    words, world_size = command_line(WORDS, 2, full_size=False, world_size=None)
    assert world_size == 2
    cut = {"--hidden-size": "64", "--num-experts": "8", "--seq-length": "8", "--global-batch-size": "6"}
    kept = {"--num-layers": "3", "--moe-router-topk": "8", "--num-query-groups": "4", "--moe-layer-freq": "[0,1,1]"}
    assert {flag: value_of(words, flag) for flag in cut | kept} == cut | kept
    assert not {"--data-path", "some_text_document", "--save", "--train-samples"} & set(words)


def test_small_sizes_stay():
    words, _ = command_line(["--num-layers", "1", "--seq-length", "4", "--num-attention-heads", "2"], 2, False, None)
    assert value_of(words, "--seq-length") == "4"


def test_unknown_flag_ends_with_two(capsys):
    assert main(["--num-layerz", "2"]) == 2
    assert "--num-layers" in capsys.readouterr().err


def test_reduction_that_nobody_waits_for_ends_with_one(capfd, monkeypatch):
    monkeypatch.setattr(BucketGroup, "finish_param_gather", lambda self: None)
    assert main(WORDS) == 1
    output = capfd.readouterr().out
    assert "read without order: module.embedding.word_embeddings.weight bfloat16" in output
    assert "  first  c10d._allgather_base_ on dp_cp group at megatron/core/utils/collectives.py" in output
    assert "  compute has not waited for dp_cp group" in output


@pytest.mark.full
def test_clean_configuration_ends_with_zero(capfd):
    assert main(WORDS) == 0
    assert "stream check: no findings in" in capfd.readouterr().out


def test_widths_and_lengths_may_be_left_out():
    flags = ["--expert-model-parallel-size", "2", "--num-experts", "4", "--num-layers", "2"]
    words, world_size = command_line(flags, 2, False, None)
    assert world_size == 2
    assert words[words.index("--seq-length") + 1] == "8"
