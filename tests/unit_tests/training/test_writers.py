"""What a run leaves beside its log: TensorBoard events, calls of Weights & Biases, progress.txt."""

import logging
import re
import sys
from types import SimpleNamespace

import pytest

from megatron.core import optional_deps
from megatron.training import writers
from megatron.training.initialize import shut_down
from tests.common.broken_ranks import FLAGS
from tests.common.forked_run import run_ranks
from tools.run_metrics import read_tensorboard

MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
LENGTH = "--train-iters 4 --eval-interval 2 --eval-iters 1"
VALUES = (
    "--log-params-norm --log-num-zeros-in-grad --log-throughput --log-world-size-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --iterations-to-skip 1 --log-interval 2"
)
WITH_TWIN = {"learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros"}
WITH_TWIN |= {"params-norm", "lm loss validation", "lm loss validation ppl"}


def words(*more):
    kept = FLAGS.replace("--train-iters 500", "").replace("--eval-iters 0", "").replace("--log-interval 1", "")
    return [word for text in (kept, LENGTH, *more) for word in text.split()]


def test_event_file_has_megatron_keys_and_twins_against_samples(tmp_path):
    result = run_ranks(2, words(MOE, VALUES, f"--tensorboard-dir {tmp_path}"))[1]
    assert result.status == 0, result.output[-3000:]
    scalars = read_tensorboard(tmp_path)
    assert {key for key in scalars if f"{key} vs samples" in scalars} == WITH_TWIN
    plain = {"load_balancing_loss", "z_loss", "skipped-train-samples", "iteration-time", "throughput"}
    assert plain <= set(scalars)
    assert list(scalars["lm loss"]) == [2, 3, 4]
    assert list(scalars["lm loss vs samples"]) == [12, 18, 24]
    assert scalars["skipped-train-samples"] == dict.fromkeys([2, 3, 4], 6.0)
    assert scalars["world-size"][4] == 2.0
    assert list(scalars["iteration-time"]) == [4]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


@pytest.fixture
def wandb(monkeypatch):
    """A module that keeps the calls."""
    calls = []
    module = SimpleNamespace(
        init=lambda **settings: calls.append(("init", settings)),
        log=lambda scalars, step: calls.append(("log", scalars, step)),
        finish=lambda: calls.append(("finish",)),
    )
    plain = optional_deps.require
    monkeypatch.setattr(writers, "require", lambda name, **why: module if name == "wandb" else plain(name, **why))
    yield calls
    shut_down()
    logging.getLogger("megatron").handlers.clear()  # they hold the standard error of this test


def test_wandb_gets_the_name_the_scalars_and_the_end(wandb, monkeypatch, tmp_path):
    import pretrain_gpt

    flags = f"--wandb-project tree --wandb-exp-name first --save {tmp_path} --wandb-entity us"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words(flags)])
    assert pretrain_gpt.main() == 0
    settings = wandb[0][1]
    assert (settings["project"], settings["name"], settings["entity"]) == ("tree", "first", "us")
    assert settings["dir"] == str(tmp_path / "wandb")
    assert settings["config"]["train_iters"] == 4
    logged = [(step, key) for kind, scalars, step in wandb[1:-1] for key in scalars if kind == "log"]
    assert {(step, "lm loss") for step in (1, 2, 3, 4)} <= set(logged)
    assert {(2, "lm loss validation"), (4, "lm loss validation")} <= set(logged)
    assert wandb[-1] == ("finish",)


def test_progress_file_has_a_line_per_start_and_save(tmp_path):
    flags = f"--save {tmp_path} --load {tmp_path} --log-progress --save-interval 2 --async-save"
    for more in ("--exit-interval 2", ""):
        assert run_ranks(1, words(flags, more))[0].status == 0
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    found = [re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\tGPUs: 1\t(.*?)\titeration: (\d+)\t", line) for line in lines]
    start, save = "started job", "saved checkpoint"
    assert [match.groups() for match in found] == [(start, "0"), (save, "2"), (start, "2"), (save, "4")]
    assert "\tsamples: 24\ttokens: 3.84E+02\tFLOPs: " in lines[-1]
    assert "TFLOP/s/GPU of the job: " in lines[-1]
