"""--use-checkpoint-args takes the model from the checkpoint and leaves the run to the command line."""

import json
import shlex

import pytest

from megatron.core.errors import ConfigError
from megatron.training import arguments, checkpoint_args

RUN = "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --device cpu --seq-length 8"
MODEL = (
    "--num-layers 4 --hidden-size 96 --num-attention-heads 6 --max-position-embeddings 32 "
    "--tokenizer-type ByteTokenizer"
)
STORED = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16, "num_query_groups": 4}


def parse(line):
    return arguments.parse_args(shlex.split(line))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    iteration = tmp_path / "iter_0000005"
    stored = {**STORED, "seq_length": 32, "lr": 0.5, "max_position_embeddings": 32, "tokenizer_type": "ByteTokenizer"}
    monkeypatch.setattr(checkpoint_args, "folder_to_load", lambda root, step, fallback: iteration)
    monkeypatch.setattr(
        checkpoint_args, "load_common", lambda found, required: json.loads(json.dumps({"args": stored}))
    )
    return tmp_path


def test_model_comes_from_the_checkpoint_and_says_so(folder):
    args = parse(f"{RUN} --load {folder} --use-checkpoint-args")
    assert (args.num_layers, args.hidden_size, args.seq_length) == (2, 64, 32)
    assert args.origins["num_layers"] == "checkpoint (iter_0000005)"


def test_run_stays_with_the_command_line(folder):
    assert parse(f"{RUN} --load {folder} --use-checkpoint-args").lr == 0.001


def test_without_the_flag_the_command_line_decides(folder):
    assert parse(f"{RUN} {MODEL} --load {folder}").num_layers == 4


def test_flag_needs_a_folder(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"use_checkpoint_args=True with load=None: needs --load"):
        parse(f"{RUN} {MODEL} --use-checkpoint-args")


def test_how_a_run_computes_is_not_stored():
    stored = set(checkpoint_args.stored_destinations())
    assert not stored & checkpoint_args.OF_THE_RUN
    assert {"num_experts", "moe_router_topk", "rotary_base", "tokenizer_type", "padded_vocab_size"} <= stored
