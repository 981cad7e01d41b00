"""Values that no run can have are refused with their flag, before anything is built."""

import shlex

import pytest

from megatron.core.errors import ConfigError
from megatron.training import arguments

pytestmark = pytest.mark.usefixtures("no_launcher")
TINY = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type ByteTokenizer --device cpu"
)
MOE = TINY + " --num-experts 8 --moe-token-dispatcher-type alltoall"


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
        ("--eval-micro-batch-size 0", "eval_micro_batch_size=0: at least 1; raise --eval-micro-batch-size"),
        ("--eval-global-batch-size 0", "eval_global_batch_size=0: at least 1; raise --eval-global-batch-size"),
        ("--lr-warmup-init -1", "lr_warmup_init=-1.0: not negative; set --lr-warmup-init to 0 or more"),
        ("--ckpt-step 0 --load a", "ckpt_step=0: iterations are counted from 1; name a saved iteration with"),
        ("--distributed-timeout-minutes 525601", "distributed_timeout_minutes=525601: from 1 to 525600, a year"),
        ("--seed 9223372036854775808", "seed='9223372036854775808': an integer of 64 bits; give a smaller one"),
        ("--profile", "profile=True with use_pytorch_profiler=False, device='cpu': they are marked by the CUDA driver"),
        ("--profile --use-pytorch-profiler --profile-ranks 0 1", "profile_ranks=[0, 1] with world_size=1: ranks are"),
        ("--profile --use-pytorch-profiler --profile-step-start -1", "profile_step_start=-1: steps are counted from 0"),
        (
            "--num-virtual-stages-per-pipeline-rank 0",
            "virtual_pipeline_model_parallel_size=0: a pipeline rank has at least one chunk of layers; set "
            "--num-virtual-stages-per-pipeline-rank to 1 or more, or drop it",
        ),
        ("--num-layers-per-virtual-pipeline-stage -1", "num_layers_per_virtual_pipeline_stage=-1: a chunk has layers"),
        ("--tensor-model-parallel-size 0", "tensor_model_parallel_size=0: a group has at least one rank; set --tens"),
        ("--num-layers -1", "num_layers=-1: the model needs it; set --num-layers to a positive number"),
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
        ("--moe-router-topk-scaling-factor 0", "moe_router_topk_scaling_factor=0.0: experts add to the stream"),
        ("--hidden-size 0", "hidden_size=0: the model needs it; set --hidden-size to a positive number"),
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
