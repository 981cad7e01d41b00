"""The dense GPT on a GPU: initial weights, attention kernels, dtypes."""

import math

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.tensor_parallel import random as rng
from tests.common.small_models import SWIGLU, random_tokens, small_config, small_gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

LLAMA = {**SWIGLU, "normalization": "RMSNorm", "num_query_groups": 2, "qk_layernorm": True, "kv_channels": 64}


def build(device, **fields):
    return small_gpt(small_config(**{**LLAMA, "device": device, **fields}), position_embedding_type="rope")


def step(model, length=16):
    device = next(model.parameters()).device
    tokens, positions, labels = (x.to(device) for x in random_tokens(length=length))
    loss = model(tokens, positions, None, labels=labels).mean()
    loss.backward()
    return loss.detach().cpu(), {name: param.grad.cpu() for name, param in model.named_parameters()}


def test_initial_weights_are_bitwise_those_of_the_cpu():
    models = [build(device, bf16=True) for device in ("cpu", "cuda")]
    for (name, expected), (_, got) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(expected, got.cpu()), name


def test_weights_drawn_on_the_device_have_the_same_distribution():
    weight = build("cuda", init_device="device", hidden_size=64).decoder.layers[0].mlp.linear_fc1.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_loss_and_gradients_equal_the_cpu(dtype, tolerance):
    (cpu_loss, cpu_grads), (loss, grads) = (step(build(device, params_dtype=dtype)) for device in ("cpu", "cuda"))
    torch.testing.assert_close(loss, cpu_loss, rtol=tolerance, atol=0)
    for name, expected in cpu_grads.items():
        assert (grads[name] - expected).abs().max() <= tolerance * expected.abs().max(), name


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "unfused"])
def test_attention_kernels_agree_in_bf16(backend):
    loss, grads = step(build("cuda", bf16=True, attention_backend=backend))
    reference_loss, reference_grads = step(build("cpu", params_dtype=torch.float64))
    assert loss.item() == pytest.approx(reference_loss.item(), rel=1e-2)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    error = (grads[name].double() - reference_grads[name]).norm() / reference_grads[name].norm()
    assert error < 0.05


def test_dropout_differs_between_calls_and_repeats_after_seeding():
    model = build("cuda", bf16=True, attention_dropout=0.2, hidden_dropout=0.2)
    losses = []
    for _ in range(2):
        rng.reset()
        rng.model_parallel_cuda_manual_seed(5, device="cuda")
        losses.append([step(model)[0].item() for _ in range(2)])
    rng.reset()
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]
    assert losses[0][0] == pytest.approx(math.log(32), rel=0.05)


@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_deterministic_mode_repeats_bit_for_bit(backend, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        runs = [step(build("cuda", bf16=True, deterministic_mode=True, attention_backend=backend), 256) for _ in "ab"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(grad, runs[1][1][name]) for name, grad in runs[0][1].items())


def test_kernels_that_cannot_run_are_refused():
    with pytest.raises(ConfigError, match=r"attention_backend='flash' with params_dtype=torch.float32: .*add --bf16"):
        build("cuda", params_dtype=torch.float32, attention_backend="flash")
    with pytest.raises(ConfigError, match=r"attention_backend='fused' with deterministic_mode=True: cuDNN"):
        build("cuda", bf16=True, deterministic_mode=True, attention_backend="fused")
