"""Initialisation: lengths that follow from samples, timeouts of every group, a clean end."""

import argparse
import logging
import re

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import global_vars, initialize
from megatron.training.arguments import parse_args
from megatron.training.initialize import (
    check_rendezvous,
    derive_lengths,
    initialize_megatron,
    shut_down,
    warn_about_queues,
)

FLAGS = (
    "--device cpu --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4 --max-position-embeddings 4 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 8 --distributed-timeout-minutes 17"
)


@pytest.fixture(autouse=True)
def _leave_nothing_behind():
    yield
    shut_down()


def lengths(**changes):
    args = argparse.Namespace(
        rampup_batch_size=None,
        global_batch_size=4,
        step_batch_size_schedule=None,
        seq_length=1,
        train_samples=None,
        train_iters=7,
    )
    vars(args).update(changes)
    derive_lengths(args)
    return args.train_iters, args.global_batch_size


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, (7, 4), id="by-iterations"),
        pytest.param({"train_samples": 11}, (2, 4), id="by-samples"),
        pytest.param({"train_samples": 11, "rampup_batch_size": [2, 2, 6]}, (4, 4), id="ramp"),
        pytest.param(
            {"train_samples": 40, "global_batch_size": None, "step_batch_size_schedule": "0:4 24:8"}, (8, 8), id="steps"
        ),
    ],
)
def test_iterations_follow_from_samples(changes, expected):
    assert lengths(**changes) == expected


def test_process_without_launcher_is_a_world_of_one_and_leaves_no_trace(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert initialize_megatron(parse_args(FLAGS.split())) == torch.device("cpu")
    assert (dist.get_world_size(), get_num_microbatches()) == (1, 2)
    assert global_vars.get_args().padded_vocab_size == 128
    shut_down()
    assert not dist.is_initialized()
    assert not parallel_state.is_initialized()
    with pytest.raises(RuntimeError, match="args"):
        global_vars.get_args()


def test_every_group_has_the_timeout_that_was_asked_for(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    timeouts = []
    plain = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *a, **k: (timeouts.append(k["timeout"]), plain(*a, **k))[1])
    initialize_megatron(parse_args(FLAGS.split()))
    groups = [group for group in vars(ProcessGroupCollection.use_mpu_process_groups()).values() if group is not None]
    assert len(groups) > 10
    assert {timeout.total_seconds() for timeout in timeouts} == {17 * 60}


def test_more_processes_than_gpus_is_answered_with_both_numbers(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=re.escape("LOCAL_RANK=2 with 2 visible GPUs")):
        initialize.choose_device("cuda")


def test_kernels_are_chosen_by_the_flags():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        args = argparse.Namespace(deterministic_mode=True, disable_bf16_reduced_precision_matmul=True)
        initialize.choose_kernels(args)
        assert torch.are_deterministic_algorithms_enabled()
        assert not matmul.allow_bf16_reduced_precision_reduction
    finally:
        torch.use_deterministic_algorithms(False)
        matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize(
    ("connections", "device", "is_on", "warns"),
    [("1", "cuda", True, True), ("32", "cuda", True, False), ("1", "cpu", True, False), ("1", "cuda", False, False)],
)
def test_one_queue_for_all_streams_is_warned_about(connections, device, is_on, warns, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    args = argparse.Namespace(overlap_moe_expert_parallel_comm=is_on)
    warn_about_queues(args, torch.device(device))
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1 with" in caplog.text) == warns


def test_half_of_what_a_launcher_sets_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 with MASTER_PORT unset: .*; start with torchrun"):
        check_rendezvous()
    monkeypatch.setenv("MASTER_PORT", "29500")
    check_rendezvous()
