"""--explain-config answers with values, origins, verdicts and notes, and leaves."""

import shlex

import pytest

from megatron.training.arguments import parse_args

pytestmark = pytest.mark.usefixtures("no_launcher")
TINY = (
    "--num-layers 4 --hidden-size 96 --num-attention-heads 6 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type ByteTokenizer --explain-config "
)


def explain(line, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(shlex.split(line))
    return caught.value.code, capsys.readouterr().out


def test_sound_configuration_leaves_with_0(capsys):
    code, text = explain(TINY, capsys)
    assert code == 0
    assert "kv_channels = 16  [derived from hidden_size / num_attention_heads]" in text
    assert "hidden_size = 96  [command line (--hidden-size)]" in text
    assert "clip_grad = 1.0  [default]" in text
    assert "all hold" in text


def test_broken_configuration_leaves_with_2_and_its_verdicts(capsys):
    code, text = explain(TINY + "--mtp-num-layers 1 --bf16 --fp16", capsys)
    assert code == 2
    assert "refused  mtp_num_layers=1: multi-token prediction: not there yet" in text
    assert "refused  bf16=True with fp16=True" in text


def test_world_is_the_smallest_that_the_sizes_allow(capsys):
    _, text = explain(TINY + "--num-experts 8 --expert-model-parallel-size 4", capsys)
    assert "world_size = 4  [derived from the parallel sizes: the smallest possible]" in text


def test_world_size_may_be_named(capsys):
    _, text = explain(TINY + "--num-experts 8 --expert-model-parallel-size 2 --world-size 8", capsys)
    assert "world_size = 8" in text
    assert "data_parallel_size = 8" in text


def test_missing_library_is_a_note(capsys, monkeypatch):
    monkeypatch.setattr("megatron.training.explain_config.is_available", lambda name: False)
    code, text = explain(TINY + "--wandb-project p --wandb-exp-name n", capsys)
    assert code == 0
    assert "package wandb is missing: pip install" in text
