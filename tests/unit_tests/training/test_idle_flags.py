"""Flags that nothing reads beside others are announced with the reason; where they act, nothing is said."""

import re
from itertools import chain

import pytest

from megatron.training import arguments
from megatron.training.argument_factory import build_parser
from megatron.training.idle_flags import ROWS

MODEL = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --device cpu "
)
DENSE = MODEL + "--tokenizer-type ByteTokenizer --mock-data "
MOE = DENSE + "--num-experts 4 --moe-token-dispatcher-type alltoall "
FILES = MODEL + "--tokenizer-type ByteTokenizer --data-path a "
BPE = "--tokenizer-type GPT2BPETokenizer --vocab-file a --merge-file b"
# flags that do nothing after the base line, part of the reason, flags with which they act
CASES = [
    (DENSE, "--rotary-base 5000 --no-rope-fusion", "positions are learned_absolute", "--position-embedding-type rope"),
    (
        DENSE + "--position-embedding-type rope ",
        "--rope-scaling-factor 4",
        "no --use-rope-scaling",
        "--use-rope-scaling",
    ),
    (DENSE + "--swiglu ", "--no-bias-gelu-fusion", "no MLP has a GELU behind a bias", None),
    (DENSE, "--no-bias-swiglu-fusion", "no --swiglu", "--swiglu"),
    (DENSE, "--apply-wd-to-qk-layernorm", "no --qk-layernorm", "--qk-layernorm"),
    (DENSE, "--sequence-parallel", "there is no tensor parallelism", None),
    (DENSE, "--cp-comm-type p2p", "there is no context parallelism", None),
    (DENSE, "--no-overlap-p2p-communication --use-tp-pp-dp-mapping", "there is no pipeline parallelism", None),
    (DENSE, "--moe-aux-loss-coeff 0.1", "the model has no experts", "--num-experts 4"),
    (
        MOE + "--moe-router-load-balancing-type none ",
        "--moe-aux-loss-coeff 0.1",
        "--moe-router-load-balancing-type none has no balancing loss",
        "--moe-router-load-balancing-type aux_loss",
    ),
    (
        MOE + "--moe-router-score-function sigmoid ",
        "--moe-router-bias-update-rate 0.1",
        "no --moe-router-enable-expert-bias",
        "--moe-router-enable-expert-bias",
    ),
    (MOE, "--moe-token-drop-policy position", "so no token is dropped", "--moe-expert-capacity-factor 1"),
    (
        MOE,
        "--moe-shared-expert-gate",
        "no --moe-shared-expert-intermediate-size",
        "--moe-shared-expert-intermediate-size 8",
    ),
    (
        MOE + "--moe-router-score-function sigmoid ",
        "--moe-router-pre-softmax",
        "scores are sigmoid",
        "--moe-router-score-function softmax",
    ),
    (DENSE, "--fp8-margin 1 --no-fp8-wgrad", "no --fp8-format", "--fp8-format hybrid"),
    (
        DENSE + "--fp8-format hybrid --fp8-recipe blockwise ",
        "--fp8-amax-history-len 4",
        "--fp8-recipe blockwise takes scales from the tensors themselves",
        "--fp8-recipe delayed",
    ),
    (DENSE + "--fp8-format e4m3 ", "--num-layers-at-end-in-bf16 0", "no --first-l", "--first-last-layers-bf16"),
    (DENSE, "--hysteresis 3 --loss-scale-window 9", "the loss has no scale that moves", "--fp16"),
    (DENSE + "--fp16 --loss-scale 8 ", "--initial-loss-scale 16", "the loss has no scale that moves", None),
    (DENSE, "--cuda-graph-warmup-steps 2", "no step is captured", None),
    (DENSE + "--optimizer sgd ", "--adam-beta1 0.8 --adam-eps 1", "the optimizer is sgd", "--optimizer adam"),
    (DENSE, "--sgd-momentum 0.8", "the optimizer is adam", "--optimizer sgd"),
    (
        DENSE + "--lr-decay-style constant ",
        "--min-lr 1e-4 --lr-decay-iters 3",
        "the rate is constant",
        "--lr-decay-style cosine",
    ),
    (DENSE, "--lr-wsd-decay-iters 2 --lr-wsd-decay-style linear", "the decay is linear", "--lr-decay-style WSD"),
    (DENSE + "--eval-iters 0 ", "--eval-interval 2", "--eval-iters 0 means no evaluation", "--eval-iters 1"),
    (DENSE, "--manual-gc-interval 2 --no-manual-gc-eval", "no --manual-gc is given", "--manual-gc"),
    (DENSE, "--exit-signal 15", "no --exit-signal-handler is given", "--exit-signal-handler"),
    (DENSE, "--empty-unused-memory-level 1", "there is no GPU", None),
    (DENSE, "--no-save-optim --no-save-rng", "nothing is saved", "--save a"),
    (DENSE, "--finetune --verify-integrity --dist-ckpt-strictness log_all", "nothing is loaded", "--load a"),
    (DENSE, "--no-load-rng", "nothing is loaded", "--pretrained-checkpoint a"),
    (DENSE, "--log-timers-to-tensorboard", "there is neither --tensorboard-dir nor", "--tensorboard-dir a"),
    (DENSE, "--tensorboard-queue-size 9", "no --tensorboard-dir", "--tensorboard-dir a"),
    (DENSE, "--wandb-exp-name a --wandb-entity b", "no --wandb-project", "--wandb-project a"),
    (DENSE, "--use-pytorch-profiler --profile-ranks 0", "no --profile is given", "--profile"),
    (
        DENSE + "--device cuda --profile ",
        "--pytorch-profiler-collect-shapes",
        "no --use-pytorch-profiler",
        "--use-pytorch-profiler",
    ),
    (FILES + "--reset-attention-mask ", "--no-data-sharding", "the order is single", "--dataloader-type cyclic"),
    (DENSE, "--no-mmap-bin-files", "--mock-data reads no file", None),
    (FILES, "--no-mmap-bin-files --no-data-sharding", "the order is single", None),
    (DENSE, "--no-create-attention-mask-in-dataloader", "causal masks are never shipped", None),
    (
        DENSE,
        "--tokenizer-model a --trust-remote-code",
        "the tokenizer is ByteTokenizer",
        "--tokenizer-type HuggingFaceTokenizer",
    ),
    (DENSE, "--vocab-file a --merge-file b", "the tokenizer is ByteTokenizer", BPE),
    (DENSE, "--vocab-size 9", "the tokenizer is ByteTokenizer", "--tokenizer-type NullTokenizer"),
    (
        DENSE,
        "--tiktoken-num-special-tokens 9",
        "the tokenizer is ByteTokenizer",
        "--tokenizer-type TikTokenizer --tokenizer-model a",
    ),
]


@pytest.fixture
def told(no_launcher, caplog):
    """The words in front of each reason that a command line is told about."""

    def parse(line):
        caplog.clear()
        arguments.parse_args(line.split())
        lines = [line.split(": accepted, no effect here: ") for line in caplog.messages]
        return {words[1]: words[0].split() for words in lines if len(words) == 2}

    return parse


@pytest.mark.parametrize(("base", "idle", "reason", "acting"), CASES)
def test_flag_without_effect_is_announced_and_one_that_acts_is_not(told, base, idle, reason, acting):
    flags = {word for word in idle.split() if word.startswith("--")}
    (words,) = [words for why, words in told(base + idle).items() if reason in why]
    assert set(words) <= flags
    if acting is not None:
        assert not flags & set(chain(*told(f"{base} {idle} {acting}").values()))


def test_rows_name_flags_of_the_parser():
    known = {spec.dest for spec in build_parser().specs.values()}
    assert {dest for row in ROWS for dest in row.dests.split()} <= known


@pytest.mark.full
def test_every_reason_has_a_case(told):
    found = {reason for base, idle, _, _ in CASES for reason in told(base + idle)}
    for row in ROWS:
        pattern = re.sub(r"\\\{\w+\\\}", ".*", re.escape(row.reason))
        assert any(re.fullmatch(pattern, reason) for reason in found), row.reason
