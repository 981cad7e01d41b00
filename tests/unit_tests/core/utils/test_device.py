"""The choice of a device."""

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.utils.device import resolve_device


def test_cpu_is_the_cpu():
    assert resolve_device("cpu") == torch.device("cpu")


def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")


def test_missing_gpu_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device='cuda': .* use --device cpu"):
        resolve_device("cuda")


def test_unknown_device_lists_the_choices():
    with pytest.raises(ConfigError, match=r"device='tpu': .* auto, cpu, cuda"):
        resolve_device("tpu")


def test_cuda_takes_the_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="LOCAL_RANK=2: this machine shows 2 CUDA devices"):
        resolve_device("cuda")
