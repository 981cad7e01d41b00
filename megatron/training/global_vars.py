"""What every part of the training program may ask for without being handed it: arguments, timers, writers, tokenizer.

One object holds it all. Core code never imports this file; it gets what it needs as arguments.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from megatron.core.timers import Timers


@dataclass
class _TrainingGlobals:
    """Slots that initialisation fills once per process. None means not set."""

    args: argparse.Namespace | None = None
    timers: Timers | None = None
    tokenizer: Any = None
    tensorboard_writer: Any = None
    """Only on the last rank, and only with a TensorBoard directory."""
    wandb_writer: Any = None
    """Only on the last rank, and only with a W&B project."""


_GLOBALS = _TrainingGlobals()


def _required(name: str) -> Any:
    value = getattr(_GLOBALS, name)
    if value is None:
        raise RuntimeError(f"{name}=None: training globals are not set; call initialize_megatron or set_{name} first.")
    return value


def get_args() -> argparse.Namespace:
    """The parsed and validated command line of this process."""
    return _required("args")


def set_args(args: argparse.Namespace) -> None:
    """Make `args` what get_args returns; replaces an earlier value."""
    _GLOBALS.args = args


def get_timers() -> Timers:
    """The timers of this process."""
    return _required("timers")


def set_timers(timers: Timers) -> None:
    """Make `timers` what get_timers returns."""
    _GLOBALS.timers = timers


def get_tokenizer() -> Any:
    """The tokenizer that the arguments ask for."""
    return _required("tokenizer")


def set_tokenizer(tokenizer: Any) -> None:
    """Make `tokenizer` what get_tokenizer returns."""
    _GLOBALS.tokenizer = tokenizer


def get_tensorboard_writer() -> Any:
    """The TensorBoard writer, or None on ranks that write none."""
    return _GLOBALS.tensorboard_writer


def set_tensorboard_writer(writer: Any) -> None:
    """Make `writer` what get_tensorboard_writer returns."""
    _GLOBALS.tensorboard_writer = writer


def get_wandb_writer() -> Any:
    """The running W&B module, or None on ranks that write none."""
    return _GLOBALS.wandb_writer


def set_wandb_writer(writer: Any) -> None:
    """Make `writer` what get_wandb_writer returns."""
    _GLOBALS.wandb_writer = writer


def reset() -> None:
    """Forget everything, so that a second run in the same process starts clean."""
    _GLOBALS.__dict__.update(_TrainingGlobals().__dict__)
