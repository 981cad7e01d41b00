"""Models of about a billion parameters on two GPUs: they learn, and a profile shows communication beside compute."""

import dataclasses
import math

import pytest
import torch

from tests.common.trace_overlap import hidden_share, read_kernels
from tests.functional_tests.cases import find_cases, launch
from tools.run_metrics import parse_log

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

NUM_STEPS = 12
COMMON = {
    "--device": "cuda",
    "--bf16": True,
    "--init-device": "device",
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--micro-batch-size": 4,
    "--global-batch-size": 16,
    "--train-iters": NUM_STEPS,
    "--lr": 3.0e-4,
    "--lr-warmup-iters": 2,
    "--log-throughput": True,
    "--eval-iters": 0,
    "--profile": True,
    "--use-pytorch-profiler": True,
    "--profile-step-start": 9,
    "--profile-step-end": 11,
}
DENSE = COMMON | {
    "--num-layers": 20,
    "--hidden-size": 2048,
    "--ffn-hidden-size": 5632,
    "--num-attention-heads": 16,
    "--num-query-groups": 16,
}
MIXTURE = COMMON | {
    "--num-layers": 10,
    "--hidden-size": 1024,
    "--num-attention-heads": 8,
    "--num-experts": 32,
    "--moe-ffn-hidden-size": 1024,
}
ZERO = {
    "--use-distributed-optimizer": True,
    "--overlap-grad-reduce": True,
    "--overlap-param-gather": True,
    "--expert-model-parallel-size": 1,
}
# No NVLink multicast: the machine may not offer it to NCCL.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0"}


def run(folder, model_args, dense, num_processes=2):
    """Metrics of a run with these flags, and the kernels of the profiled steps on rank 0."""
    (case,) = find_cases(["gpt_moe/ep2_fp32"])
    kept = {flag: value for flag, value in case.model_args.items() if not (dense and "moe" in flag)}
    if dense:
        del kept["--num-experts"]
    args = {**kept, **model_args, "--tensorboard-dir": str(folder / "tensorboard")}
    case = dataclasses.replace(case, model_args=args, num_processes=num_processes, env_vars=ENVIRONMENT)
    metrics = parse_log(launch(case, folder / "run"))
    trace = folder / "tensorboard" / "profile" / "rank-0.json"
    loss = metrics["lm loss"]
    rate = metrics["throughput per GPU (TFLOP/s/GPU)"][NUM_STEPS]
    print(f"loss {loss[1]:.3f} -> {loss[NUM_STEPS]:.3f}, {rate} TFLOP/s per GPU")
    assert all(math.isfinite(value) for value in loss.values())
    assert loss[NUM_STEPS] < loss[1] - 1.0
    return metrics, read_kernels(trace) if trace.exists() else []


def check_hidden(kernels, least):
    """Every named communication is hidden at least to this share."""
    shares = {name: hidden_share(kernels, name) for name in least}
    print(f"hidden beside compute: {', '.join(f'{name} {share:.2f}' for name, share in shares.items())}")
    assert all(shares[name] >= share for name, share in least.items()), shares


def test_sharded_optimizer_hides_reduction_and_gather(tmp_path):
    _, kernels = run(tmp_path, DENSE | ZERO, dense=True)
    check_hidden(kernels, {"ReduceScatter": 0.3, "AllGather": 0.3})


def test_tensor_parallel_hides_a_part_of_its_exchanges(tmp_path):
    split = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True, "--expert-model-parallel-size": 1}
    _, kernels = run(tmp_path, DENSE | split, dense=True)
    check_hidden(kernels, {"ReduceScatter": 0.05, "AllGather": 0.05})


def test_expert_parallel_mixture_hides_reduction_and_gather(tmp_path):
    _, kernels = run(tmp_path, MIXTURE | ZERO | {"--expert-model-parallel-size": 2}, dense=False)
    check_hidden(kernels, {"ReduceScatter": 0.2})


FEW_LAYERS = DENSE | {"--num-layers": 4, "--expert-model-parallel-size": 1, "--profile": False}


@pytest.fixture(scope="module")
def one_gpu_losses(tmp_path_factory):
    metrics, _ = run(tmp_path_factory.mktemp("one"), FEW_LAYERS, dense=True, num_processes=1)
    return metrics["lm loss"]


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
def test_context_parallel_curve_is_that_of_one_gpu(tmp_path, comm_type, one_gpu_losses):
    split = {"--context-parallel-size": 2, "--cp-comm-type": comm_type}
    two, _ = run(tmp_path, FEW_LAYERS | split, dense=True)
    differences = [abs(two["lm loss"][step] / value - 1) for step, value in one_gpu_losses.items()]
    print(f"{comm_type}: largest relative difference {max(differences):.2e}")
    assert len(differences) == NUM_STEPS
    assert max(differences) < 1e-2
