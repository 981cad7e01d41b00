"""Values that no run can have are refused with their flag, before anything is built."""

import shlex

import pytest

from megatron.core.errors import ConfigError
from megatron.training import arguments

TINY = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type ByteTokenizer --device cpu"
)
MOE = TINY + " --num-experts 8 --moe-token-dispatcher-type alltoall"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def problems(line):
    with pytest.raises(ConfigError) as caught:
        arguments.parse_args(shlex.split(line))
    return str(caught.value).split("\n")


@pytest.mark.parametrize("flag", ["--lr", "--clip-grad", "--weight-decay", "--norm-epsilon", "--init-method-std"])
@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_number_is_finite(flag, word):
    dest = {"--norm-epsilon": "layernorm_epsilon"}.get(flag, flag[2:].replace("-", "_"))
    assert problems(f"{TINY} {flag}={word}") == [f"{dest}='{word}': not a finite number; give one (given: {flag})"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kv-channels 0", "kv_channels=0: a head has channels; set --kv-channels to 1 or more"),
        ("--norm-epsilon -1", "layernorm_epsilon=-1.0: not negative; set --norm-epsilon to 0 or more"),
        ("--init-method-std -1", "init_method_std=-1.0: not negative; set --init-method-std to 0 or more"),
        ("--rotary-base 0", "rotary_base=0: frequencies and positions are divided by it"),
        ("--rope-scaling-factor 0", "rope_scaling_factor=0.0: frequencies and positions are divided by it"),
        ("--rotary-seq-len-interpolation-factor 0", "rotary_seq_len_interpolation_factor=0: frequencies and pos"),
        ("--seed 0", "seed=0: from 1 to 4000000000; set --seed to such a number"),
        ("--seed 4294967296", "seed=4294967296: from 1 to 4000000000"),
        ("--exit-interval -1", "exit_interval=-1: at least 1; raise --exit-interval or drop it"),
        ("--exit-duration-in-mins -1", "exit_duration_in_mins=-1: at least 0"),
        ("--eval-iters -1", "eval_iters=-1: at least 0"),
        ("--iterations-to-skip 2 0", "iterations_to_skip=[2, 0]: iterations are counted from 1"),
        ("--exit-signal-handler --exit-signal 9", "exit_signal=9: no process can handle this signal"),
        ("--save ''", "save='': an empty word is no folder; name a folder after --save or drop it"),
        ("--lr-decay-iters 0", "lr_decay_iters=0: at least 1; raise --lr-decay-iters or drop it"),
        (
            "--reset-attention-mask --no-create-attention-mask-in-dataloader",
            "reset_attention_mask=True with create_attention_mask_in_dataloader=False: documents are hidden by",
        ),
    ],
)
def test_impossible_value_is_refused_by_name(flags, message):
    (line,) = problems(f"{TINY} {flags}")
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--moe-ffn-hidden-size 0", "moe_ffn_hidden_size=0: an expert has a width"),
        ("--moe-shared-expert-intermediate-size -8", "moe_shared_expert_intermediate_size=-8: an expert has a width"),
        ("--moe-z-loss-coeff -1", "moe_z_loss_coeff=-1.0: not negative"),
        ("--moe-input-jitter-eps -1", "moe_input_jitter_eps=-1.0: not negative"),
        ("--moe-aux-loss-coeff -0.1", "moe_aux_loss_coeff=-0.1: not negative"),
    ],
)
def test_impossible_value_of_experts_is_refused_by_name(flags, message):
    (line,) = problems(f"{MOE} {flags}")
    assert line.startswith(message)


@pytest.mark.parametrize("flags", ["--kv-channels 3", "--kv-channels 4 --rotary-percent 0.1"])
def test_rotary_positions_turn_pairs_of_channels(flags):
    (line,) = problems(f"{TINY} --position-embedding-type rope {flags}")
    assert line.startswith("kv_channels=")
    assert ": channels turn in pairs; make --kv-channels times --rotary-percent an even number" in line


def test_split_that_was_not_given_is_not_blamed():
    lines = problems(f"{TINY.replace('--mock-data', '--data-path a')} --train-data-path b")
    assert len(lines) == 1
    assert lines[0].startswith("data_path=['a'] with train_data_path=['b']: a run has one source of data")
