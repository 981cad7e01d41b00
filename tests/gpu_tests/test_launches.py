"""Whole training runs on a GPU, each beside the run that it must agree with."""

import dataclasses
import math

import pytest
import torch

from tests.functional_tests.cases import Case, find_cases, launch
from tools.loss_compare import relative_differences
from tools.run_metrics import parse_log, parse_state_hashes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOSS_RTOL = 1e-4
NUM_STEPS = 20
SAVE_STEP = 8


def moe_case(num_processes, **changes) -> Case:
    """The functional case of a mixture in fp32, with other flags."""
    (case,) = find_cases(["gpt_moe/ep2_fp32"])
    model_args = {**case.model_args, "--expert-model-parallel-size": num_processes}
    model_args.update({f"--{name.replace('_', '-')}": value for name, value in changes.items()})
    return dataclasses.replace(case, model_args=model_args, num_processes=num_processes)


def compare_loss_curves(tmp_path, num_processes):
    curves = {}
    for device in ("cpu", "cuda"):
        log = launch(moe_case(num_processes, device=device, train_iters=NUM_STEPS), tmp_path / device)
        curves[device] = parse_log(log)["lm loss"]
    differences = relative_differences(curves["cpu"], curves["cuda"])
    print(f"{num_processes} processes: largest relative difference {max(differences.values()):.3e}")
    assert sorted(differences) == list(range(1, NUM_STEPS + 1))
    assert max(differences.values()) <= LOSS_RTOL
    assert curves["cuda"][NUM_STEPS] < curves["cuda"][1] - 1.0


def test_loss_curves_of_cpu_and_cuda_agree(tmp_path):
    compare_loss_curves(tmp_path, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_loss_curves_agree_on_two_gpus(tmp_path):
    compare_loss_curves(tmp_path, 2)


def test_bf16_mixture_learns_with_grouped_experts(tmp_path):
    num_processes = min(torch.cuda.device_count(), 2)
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 2, "moe_ffn_hidden_size": 512}
    batch = {"seq_length": 256, "max_position_embeddings": 256, "micro_batch_size": 16, "global_batch_size": 64}
    case = moe_case(num_processes, device="cuda", bf16=True, train_iters=60, log_throughput=True, **sizes, **batch)
    metrics = parse_log(launch(case, tmp_path / "run"))
    loss = metrics["lm loss"]
    print(f"loss {loss[1]:.3f} -> {loss[60]:.3f}, TFLOP/s {metrics['throughput per GPU (TFLOP/s/GPU)'][60]}")
    assert all(math.isfinite(value) for value in loss.values())
    assert loss[60] < 2.6
    assert metrics["number of skipped iterations"][60] == 0


def test_deterministic_runs_are_bitwise_equal(tmp_path):
    num_processes = min(torch.cuda.device_count(), 2)
    case = moe_case(num_processes, device="cuda", bf16=True, deterministic_mode=True, log_state_hash=True)
    hashes = [parse_state_hashes(launch(case, tmp_path / name)) for name in ("first", "second")]
    assert len(hashes[0]) == NUM_STEPS
    assert hashes[0] == hashes[1]


def test_resume_with_dropout_is_bitwise_on_a_gpu(tmp_path):
    num_processes = min(torch.cuda.device_count(), 2)
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    flags = {"device": "cuda", "bf16": True, "deterministic_mode": True, "log_state_hash": True, **dropout}
    straight = parse_state_hashes(launch(moe_case(num_processes, **flags), tmp_path / "straight"))
    save = {"save": tmp_path / "saved", "async_save": True}
    first = launch(moe_case(num_processes, **flags, **save, exit_interval=SAVE_STEP), tmp_path / "first")
    second = launch(moe_case(num_processes, **flags, load=tmp_path / "saved"), tmp_path / "second")
    assert len(straight) == NUM_STEPS
    resumed = {**parse_state_hashes(first), **parse_state_hashes(second)}
    assert resumed == straight
