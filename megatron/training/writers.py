"""TensorBoard and Weights & Biases writers: made on the last rank only, and only if asked for."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.optional_deps import require
from megatron.core.utils.logging import get_rank, get_world_size
from megatron.training import global_vars


def build_writers(args: argparse.Namespace) -> None:
    """Make the writers that the arguments ask for and store them in the training globals."""
    if get_rank() != get_world_size() - 1:
        return
    if args.tensorboard_dir:
        global_vars.set_tensorboard_writer(_tensorboard(args))
    if args.wandb_project:
        global_vars.set_wandb_writer(_wandb(args))


def _tensorboard(args: argparse.Namespace) -> Any:
    tensorboard = require("tensorboard", needed_by=f"tensorboard_dir={args.tensorboard_dir!r}")
    try:
        return tensorboard.SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size)
    except OSError as error:
        raise ConfigError(
            f"tensorboard_dir={args.tensorboard_dir!r}: the folder cannot be written ({error.strerror}); give another "
            "one with --tensorboard-dir."
        ) from error


def _wandb(args: argparse.Namespace) -> Any:
    if not args.wandb_exp_name:
        raise ConfigError(
            f"wandb_exp_name='' with wandb_project={args.wandb_project!r}: a run needs a name; set --wandb-exp-name."
        )
    wandb = require("wandb", needed_by=f"wandb_project={args.wandb_project!r}")
    save_dir = args.wandb_save_dir or str(Path(args.save or ".") / "wandb")
    wandb.init(
        dir=save_dir,
        name=args.wandb_exp_name,
        project=args.wandb_project,
        entity=args.wandb_entity or None,
        config=vars(args),
    )
    return wandb


def write_scalars(scalars: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
    """Write each scalar twice to TensorBoard, against iterations and as `<key> vs samples`, and once to W&B."""
    tensorboard, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if tensorboard is not None:
        for key, value in scalars.items():
            tensorboard.add_scalar(key, value, iteration)
            tensorboard.add_scalar(f"{key} vs samples", value, consumed_samples)
    if wandb is not None:
        wandb.log(dict(scalars), iteration)


def write_plain_scalars(scalars: Mapping[str, float], iteration: int) -> None:
    """Write scalars that have no twin against samples."""
    tensorboard, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if tensorboard is not None:
        for key, value in scalars.items():
            tensorboard.add_scalar(key, value, iteration)
    if wandb is not None:
        wandb.log(dict(scalars), iteration)


def close_writers() -> None:
    """Flush and close what was opened; safe to call on every rank."""
    tensorboard, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if tensorboard is not None:
        tensorboard.close()
    if wandb is not None:
        wandb.finish()
