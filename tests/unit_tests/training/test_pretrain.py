"""`pretrain_gpt.py` as one process: it trains, stops where asked, and answers mistakes with a message."""

import re
import sys

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from tools.run_metrics import parse_log, parse_state_hashes

TINY = (
    "--device cpu --transformer-impl local --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 "
    "--lr 1e-2 --tokenizer-type NullTokenizer --vocab-size 32 --mock-data --num-workers 0 "
    "--make-vocab-size-divisible-by 1 --log-interval 1 --eval-iters 1 "
)
MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-token-dispatcher-type alltoall "


@pytest.fixture
def start(fresh_program, monkeypatch, capfd):
    def run(flags):
        length = "" if "--train-samples" in flags else "--train-iters 4 "
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *(TINY + length + flags).split()])
        code = pretrain_gpt.main()
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("flags", ["", MOE, MOE + "--bf16", "--optimizer sgd --calculate-per-token-loss"])
def test_loss_falls_and_every_step_has_a_line(start, flags):
    code, out, _ = start(flags)
    loss = parse_log(out)["lm loss"]
    assert code == 0
    assert list(loss) == [1, 2, 3, 4]
    assert loss[4] < loss[1]
    assert parse_log(out)["lm loss validation"].keys() == {4}
    assert not dist.is_initialized()


def test_same_command_gives_the_same_state(start):
    first, second = (parse_state_hashes(start(MOE + "--log-state-hash")[1]) for _ in range(2))
    assert len(first) == 4
    assert first == second
    assert len(set(first.values())) == 4


def test_other_seed_gives_another_state(start):
    first = parse_state_hashes(start("--log-state-hash")[1])
    other = parse_state_hashes(start("--log-state-hash --seed 7")[1])
    assert all(first[step] != other[step] for step in first)


def test_exit_interval_stops_without_evaluation(start):
    code, out, err = start("--exit-interval 3")
    assert code == 0
    assert list(parse_log(out)["lm loss"]) == [1, 2, 3]
    assert "exiting program at iteration 3" in err
    assert "validation" not in out


def test_skipped_iteration_consumes_its_data(start):
    code, out, _ = start("--iterations-to-skip 2")
    metrics = parse_log(out)
    assert code == 0
    assert metrics["consumed samples"] == {1: 4, 3: 12, 4: 16}
    assert metrics["skipped samples"] == {3: 4, 4: 4}


def test_batch_size_ramp_is_followed(start):
    _, out, _ = start("--rampup-batch-size 2 2 6")
    metrics = parse_log(out)
    assert metrics["global batch size"] == {1: 2, 2: 2, 3: 2, 4: 4}
    assert metrics["consumed samples"] == {1: 2, 2: 4, 3: 6, 4: 10}


def test_run_by_samples_ends_before_a_batch_that_is_not_whole(start):
    _, out, _ = start("--train-samples 11")
    assert parse_log(out)["consumed samples"] == {1: 4, 2: 8}
    assert " iteration        2/       2 |" in out


def test_skip_train_only_evaluates(start):
    code, out, _ = start("--skip-train")
    assert code == 0
    assert "lm loss" not in parse_log(out)
    assert parse_log(out)["lm loss validation"].keys() == {0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bf16 --fp16", r"bf16=True with fp16=True: a run has one compute precision"),
        ("--num-experts 2 --moe-router-topk 3", r"moe_router_topk=3 with num_moe_experts=2"),
        ("--global-batch-size 3", r"global_batch_size=3: must be a positive multiple of micro_batch_size 2"),
        ("--nonsense", r"--nonsense"),
        ("--mtp-num-layers 1", r"mtp_num_layers=1: multi-token prediction: not there yet"),
    ],
)
def test_mistake_ends_in_a_message_and_code_two(start, flags, message):
    code, out, err = start(flags)
    assert code == 2
    assert re.search(message, err)
    assert "Traceback" not in err
    assert out == ""


def nan_loss(mask, losses, plain=pretrain_gpt.loss_func):
    return plain(mask, losses * torch.nan)


def test_nan_stops_the_run_before_the_optimizer(start, monkeypatch):
    monkeypatch.setattr(pretrain_gpt, "loss_func", nan_loss)
    code, out, err = start("")
    assert code == 1
    assert "DivergenceError: rank 0: check_for_nan_in_grad=True: NaN or infinity in the gradient of decoder.fin" in err
    assert "Traceback" not in err
    assert "lm loss" not in out


def test_nan_is_printed_where_it_may_go_on(start, monkeypatch):
    monkeypatch.setattr(pretrain_gpt, "loss_func", nan_loss)
    code, out, _ = start("--no-check-for-nan-in-loss-and-grad")
    assert code == 0
    assert out.count("lm loss: NAN |") == 4
