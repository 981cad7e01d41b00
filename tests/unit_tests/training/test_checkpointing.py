"""A run that stops and goes on ends in the bits of a run that never stopped; what does not fit is refused by name."""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy
import pytest

import pretrain_gpt
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.training.checkpointing import load_checkpoint
from megatron.training.train_state import TrainingRun
from tests.common.forked_run import RankResult, run_ranks, start_ranks, wait_ranks

BASE = (
    "--device cpu --transformer-impl local --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --global-batch-size 4 --train-iters 10 --lr 1e-3 --lr-warmup-iters 2 "
    "--tokenizer-type NullTokenizer --vocab-size 500 --num-workers 0 --eval-iters 1 --eval-interval 3 --log-interval 1 "
    "--log-state-hash --split 90,10,0"
)
MOE = (
    "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall"
)
EP2 = f"{MOE} --expert-model-parallel-size 2"
PP2 = "--num-layers 4 --pipeline-model-parallel-size 2"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2 --untie-embeddings-and-output-weights"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4000"
READ_ONCE = "--ckpt-fully-parallel-load --verify-integrity"
BF16_STATES = "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten documents of 40 tokens: 22 training samples of 16 tokens, so that ten steps of four pass an epoch border."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for document in range(10):
        builder.add_document(numpy.arange(document * 40, document * 40 + 40), [40])
    builder.finalize(f"{prefix}.idx")
    return prefix


def words(corpus: Path, *parts: str, mbs: int = 2) -> list[str]:
    return f"{BASE} --data-path {corpus} --micro-batch-size {mbs} {' '.join(parts)}".split()


def run(world_size: int, argv: Sequence[str]) -> list[RankResult]:
    ranks = run_ranks(world_size, argv)
    assert [rank.status for rank in ranks] == [0] * world_size, ranks[0].output[-3000:] + ranks[-1].output[-3000:]
    return ranks


@pytest.mark.parametrize(
    ("world_size", "mbs", "model", "how"),
    [
        pytest.param(1, 2, MOE, "", id="moe"),
        pytest.param(1, 4, "--bf16", "--async-save", id="bf16-async-mbs4"),
        pytest.param(2, 2, EP2, "--async-save", id="ep2-async"),
        pytest.param(2, 2, f"{EP2} --bf16 {ZERO}", "--async-save", id="ep2-zero-bf16-async"),
        pytest.param(2, 2, f"{EP2} --bf16 {ZERO} {BF16_STATES}", "", id="ep2-bf16-states", marks=pytest.mark.full),
        pytest.param(2, 2, f"{MOE} {ZERO} --optimizer sgd", "", id="dp2-zero-sgd", marks=pytest.mark.full),
        pytest.param(
            1, 1, "--fp16 --initial-loss-scale 65536 --loss-scale-window 2", "", id="fp16", marks=pytest.mark.full
        ),
        pytest.param(1, 2, f"{MOE} --bf16", "--dataloader-type cyclic", id="cyclic", marks=pytest.mark.full),
        pytest.param(2, 2, f"{MOE} --moe-layer-freq 2 --optimizer sgd", "", id="dp2-sgd", marks=pytest.mark.full),
        pytest.param(2, 1, PP2, "", id="pp2-tied", marks=pytest.mark.full),
        pytest.param(2, 1, f"{PP2} {VPP2} {MOE} --bf16 {ZERO}", "--async-save", id="pp2-vpp2", marks=pytest.mark.full),
        pytest.param(1, 1, f"{MOE} --rampup-batch-size 2 2 12", "", id="rampup", marks=pytest.mark.full),
    ],
)
def test_four_and_six_steps_equal_ten(
    tmp_path: Path, corpus: Path, world_size: int, mbs: int, model: str, how: str
) -> None:
    cyclic = "--dataloader-type cyclic" if "cyclic" in how else ""
    straight = run(world_size, words(corpus, model, cyclic, mbs=mbs))[-1]
    save = f"--save {tmp_path} --save-interval 2 {how}"
    first = run(world_size, words(corpus, model, save, "--exit-interval 4", mbs=mbs))[-1]
    second = run(world_size, words(corpus, model, save, f"--load {tmp_path}", mbs=mbs))[-1]
    assert len(straight.hashes()) == 10
    assert first.hashes() + second.hashes() == straight.hashes()


@pytest.mark.parametrize(
    ("saved_with", "loaded_with"),
    [
        pytest.param(ZERO, READ_ONCE, id="zero-to-plain"),
        pytest.param("", ZERO, id="plain-to-zero", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("precision", ["", pytest.param("--bf16", marks=pytest.mark.full)], ids=["fp32", "bf16"])
def test_sharded_optimizer_may_come_and_go_between_runs(
    tmp_path: Path, corpus: Path, precision: str, saved_with: str, loaded_with: str
) -> None:
    """Every step has the hash of the run that was never sharded: weights, gradients, moments."""
    straight = run(2, words(corpus, EP2, precision))[-1]
    first = run(2, words(corpus, EP2, precision, saved_with, f"--save {tmp_path} --exit-interval 4"))[-1]
    second = run(2, words(corpus, EP2, precision, loaded_with, f"--load {tmp_path}"))[-1]
    assert first.hashes() + second.hashes() == straight.hashes()


def test_run_that_was_told_to_stop_goes_on_in_the_same_bits(tmp_path: Path, corpus: Path) -> None:
    """SIGTERM reaches both ranks at some step; the steps before and after it are those of an undisturbed run."""
    save, outputs = tmp_path / "save", tmp_path / "outputs"
    outputs.mkdir()
    straight = run(2, words(corpus, EP2, "--train-iters 60", mbs=1))[-1].hashes()
    stopped = words(corpus, EP2, f"--train-iters 60 --exit-signal-handler --save {save}", mbs=1)

    def body() -> int:
        sys.argv = ["pretrain_gpt.py", *stopped]
        return pretrain_gpt.main()

    children = start_ranks(2, body, outputs)
    log = outputs / "rank1.log"
    while not (log.exists() and "iteration        5/" in log.read_text()):
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGTERM)
    first = wait_ranks(children, outputs)
    assert [rank.status for rank in first] == [0, 0], first[0].output[-3000:]
    before = first[-1].hashes()
    assert 5 <= len(before) < 60
    after = run(2, words(corpus, EP2, f"--train-iters 60 --load {save}", mbs=1))[-1].hashes()
    assert before + after == straight


SAMPLES = "samples of a micro batch: "


def run_recording_samples(world_size: int, argv: Sequence[str]) -> list[RankResult]:
    """As `run`, with the first token of every sample in the output; tokens are unique in the corpus."""
    original = pretrain_gpt.get_batch

    def recording(*args: object) -> object:
        batch = original(*args)
        sys.stdout.write(f"{SAMPLES}{json.dumps(batch['tokens'][:, 0].tolist())}\n")
        return batch

    def body() -> int:
        sys.argv = ["pretrain_gpt.py", *argv]
        pretrain_gpt.get_batch = recording
        return pretrain_gpt.main()

    with tempfile.TemporaryDirectory() as folder:
        ranks = wait_ranks(start_ranks(world_size, body, Path(folder)), Path(folder))
    assert [rank.status for rank in ranks] == [0] * world_size, ranks[-1].output[-3000:]
    return ranks


def samples_by_step(ranks: Sequence[RankResult], per_step: int = 4) -> list[list[int]]:
    """The samples that all ranks together took in each step, sorted within the step."""
    taken = [
        [
            token
            for line in rank.output.splitlines()
            if line.startswith(SAMPLES)
            for token in json.loads(line[len(SAMPLES) :])
        ]
        for rank in ranks
    ]
    share = per_step // len(ranks)
    steps = len(taken[0]) // share
    return [
        sorted(token for tokens in taken for token in tokens[step * share : (step + 1) * share])
        for step in range(steps)
    ]


def test_resume_with_other_micro_batch_and_ranks_keeps_order_and_loss(tmp_path: Path, corpus: Path) -> None:
    model = "--num-experts 4 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
    straight = run_recording_samples(1, words(corpus, model, mbs=2))
    run(1, words(corpus, model, f"--save {tmp_path} --exit-interval 4", mbs=2))
    others = [(1, 1), (2, 2)]
    for world_size, mbs in others:
        resumed = run_recording_samples(world_size, words(corpus, model, f"--load {tmp_path}", mbs=mbs))
        assert samples_by_step(resumed) == samples_by_step(straight)[4:]
        assert resumed[-1].losses() == pytest.approx(straight[-1].losses()[4:], rel=1e-5)


def test_layout_may_change_between_save_and_load(tmp_path: Path, corpus: Path) -> None:
    model = "--attention-dropout 0 --hidden-dropout 0"
    straight = run(1, words(corpus, MOE, model))[-1]
    run(2, words(corpus, EP2, model, f"--save {tmp_path} --exit-interval 4", mbs=1))
    resumed = run(1, words(corpus, MOE, model, f"--load {tmp_path}"))[-1]
    assert resumed.losses() == pytest.approx(straight.losses()[4:], rel=1e-5)
    assert "generators start from --seed: saved by 2 ranks on cpu, here are 1 on cpu" in resumed.output


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of four steps, saved at 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    run(1, words(corpus, MOE, f"--save {folder} --save-interval 2 --exit-interval 4"))
    return folder


def refused(argv: Sequence[str], status: int = 1) -> str:
    (rank,) = run_ranks(1, argv)
    assert rank.status == status, rank.output[-2000:]
    assert "Traceback" not in rank.output
    return rank.output


def test_checkpoint_of_another_model_lists_the_differences(saved: Path, corpus: Path) -> None:
    text = refused(words(corpus, MOE.replace("experts 4", "experts 8"), f"--load {saved}", "--ffn-hidden-size 64"))
    assert "mlp.experts.experts.linear_fc1.weight: stored [2, 4, 128, 32], the model has [2, 8, 64, 32]" in text
    text = refused(words(corpus, f"--load {saved}"))
    assert "in the checkpoint, not in the model" in text
    assert "decoder.layers.mlp.router.weight" in text


def test_finetune_takes_the_weights_alone(saved: Path, corpus: Path) -> None:
    (rank,) = run(1, words(corpus, MOE, f"--load {saved} --finetune --exit-interval 1"))
    assert "iteration        1/      10 | consumed samples:            4" in rank.output
    assert rank.hashes() != []


def test_optimizer_and_generators_may_be_left_behind(saved: Path, corpus: Path) -> None:
    whole, without_moments, without_rng = (
        run(1, words(corpus, MOE, f"--load {saved} --exit-interval 5", flags))[-1].hashes()
        for flags in ("", "--no-load-optim", "--no-load-rng")
    )
    assert len({*whole, *without_moments, *without_rng}) == 3


def test_pretrained_weights_serve_when_load_is_empty(saved: Path, corpus: Path, tmp_path: Path) -> None:
    (rank,) = run(1, words(corpus, MOE, f"--load {tmp_path} --pretrained-checkpoint {saved} --exit-interval 1"))
    assert f"loaded checkpoint {saved}/iter_0000004 at iteration 0" in rank.output
    text = refused(words(corpus, MOE, f"--load {tmp_path} --exit-on-missing-checkpoint"))
    assert "no checkpoint there; drop --exit-on-missing-checkpoint" in text
    text = refused(words(corpus, MOE, f"--pretrained-checkpoint {tmp_path}"))
    assert f"--pretrained-checkpoint {tmp_path}: no checkpoint there; name a folder that holds one" in text


def test_load_without_a_checkpoint_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = {"pretrained_checkpoint": None, "finetune": False, "ckpt_step": None, "ckpt_fallback": False}
    args = argparse.Namespace(load=str(tmp_path), exit_on_missing_checkpoint=False, **flags)
    load_checkpoint(cast(TrainingRun, SimpleNamespace(args=args)))()
    assert f"--load {tmp_path}: no checkpoint there, the run starts from initial weights" in caplog.text


def test_model_arguments_come_from_the_checkpoint(saved: Path, corpus: Path) -> None:
    other = words(corpus, f"--load {saved} --use-checkpoint-args --exit-interval 5 --hidden-size 64 --num-layers 3")
    assert run(1, other)[-1].hashes() == run(1, words(corpus, MOE, f"--load {saved} --exit-interval 5"))[-1].hashes()


def test_step_chooses_an_older_checkpoint(saved: Path, corpus: Path) -> None:
    (rank,) = run(1, words(corpus, MOE, f"--load {saved} --ckpt-step 2 --exit-interval 3"))
    assert "iteration        3/" in rank.output


def test_retention_keeps_multiples_and_the_newest(tmp_path: Path, corpus: Path) -> None:
    run(1, words(corpus, f"--save {tmp_path} --save-interval 2 --save-retain-interval 4"))
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000008", "iter_0000010"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10\n"


def test_without_optimizer_in_the_files_the_remedy_is_named(tmp_path: Path, corpus: Path) -> None:
    run(1, words(corpus, f"--save {tmp_path} --exit-interval 2 --no-save-optim --no-save-rng"))
    text = refused(words(corpus, f"--load {tmp_path}"))
    assert "optimizer.state.exp_avg" in text
    assert "--no-load-optim" in text
    run(1, words(corpus, f"--load {tmp_path} --no-load-optim --exit-interval 3"))


@pytest.mark.full
def test_twenty_kills_leave_a_checkpoint_that_loads(tmp_path: Path, corpus: Path) -> None:
    """Two ranks save after every step and are killed after a random time; the next run goes on from what is there."""
    save, outputs = tmp_path / "save", tmp_path / "outputs"
    outputs.mkdir()
    argv = words(corpus, EP2, f"--save {save} --load {save} --save-interval 1 --eval-iters 0 --train-iters 100000")
    waits = random.Random(11)
    reached = [0]

    def body() -> int:
        sys.argv = ["pretrain_gpt.py", *argv]
        return pretrain_gpt.main()

    for _ in range(20):
        children = start_ranks(2, body, outputs)
        time.sleep(waits.uniform(1.5, 4.0))
        for child in children:
            os.kill(child, signal.SIGKILL)
        ranks = wait_ranks(children, outputs)
        assert {rank.status for rank in ranks} == {-signal.SIGKILL}, ranks[0].output[-3000:]
        tracker = save / "latest_checkpointed_iteration.txt"
        reached.append(int(tracker.read_text()) if tracker.exists() else 0)
    assert reached == sorted(reached)
    assert reached[-1] > 10
    (rank,) = run(1, words(corpus, MOE, f"--load {save} --exit-interval 1 --eval-iters 0 --train-iters 100000"))
    assert f"iteration {reached[-1] + 1:8d}/" in rank.output
