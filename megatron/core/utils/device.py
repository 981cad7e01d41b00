"""Which device a process computes on."""

import torch

from megatron.core import env
from megatron.core.errors import ConfigError

DEVICE_CHOICES = ("auto", "cpu", "cuda")


def uses_gpu(device: str) -> bool:
    """True if "auto", "cpu" or "cuda" asks for a GPU; "cuda" does, whether this machine has one or not."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def resolve_device(device: str) -> torch.device:
    """Turn "auto", "cpu" or "cuda" into a device with an index; "auto" takes CUDA where there is one.

    CUDA means the device whose number is the launcher's LOCAL_RANK, 0 without a launcher.
    """
    if device not in DEVICE_CHOICES:
        raise ConfigError(f"device={device!r}: unknown device; choose one of {', '.join(DEVICE_CHOICES)}.")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch finds no CUDA device on this machine; use --device cpu or auto.")
    index, count = env.local_rank(), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"device={device!r} with LOCAL_RANK={index}: this machine shows {count} CUDA devices; start at most "
            f"{count} processes on it or use --device cpu."
        )
    return torch.device("cuda", index)
