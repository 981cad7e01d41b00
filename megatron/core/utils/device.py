"""Which device a process computes on."""

import torch

from megatron.core.errors import ConfigError

DEVICE_CHOICES = ("auto", "cpu", "cuda")


def resolve_device(device: str) -> torch.device:
    """Turn "auto", "cpu" or "cuda" into a device with an index; "auto" takes CUDA where there is one.

    CUDA means the current CUDA device of this process, which the launcher sets from its local rank.
    """
    if device not in DEVICE_CHOICES:
        raise ConfigError(f"device={device!r}: unknown device; choose one of {', '.join(DEVICE_CHOICES)}.")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch finds no CUDA device on this machine; use --device cpu or auto.")
    return torch.device("cuda", torch.cuda.current_device())
