"""What a checkpoint of a run holds: tensors by global key, and everything else as JSON.

<model key>                           weights and persistent buffers (megatron/core/module_api/sharded_state.py)
optimizer.state.<kind>.<model key>    moments, main copies, step counts
rng_state.<rank>.<name>               generators of each rank
common.json                           counters, scheduler, loss scale, arguments, layout
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor, replicated
from megatron.core.module_api.sharded_state import sharded_model_state, stacked_key
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils.logging import get_rank, get_world_size
from megatron.training.model_setup import complete_parameters
from megatron.training.rng_state import pack_rng_state
from megatron.training.train_state import TrainingRun, TrainState

OPTIMIZER_PREFIX = "optimizer.state."
RNG_PREFIX = "rng_state."
FORMAT_VERSION = 1
COMMON_ENTRIES = ("format_version", "train_state", "scheduler", "grad_scaler", "args", "world_size", "device")
"""What `common_state` makes and a load reads."""


_FOREIGN = [
    *(
        r"(chained_\d+\.)?optimizer\..*",
        r"rng_state.*",
        r"rerun_state.*",
        r"opt_param_scheduler.*",
        r".*\._extra_state.*",
    ),
]
"""Keys beside the weights, of this and other programs that write the same format."""


def ignored_keys(foreign: bool, optimizer: bool) -> re.Pattern[str]:
    """Keys that may stay unread: generators of other ranks always, optimizer state or all but weights if asked for."""
    patterns = [re.escape(RNG_PREFIX) + ".*"]
    if optimizer:
        patterns.append(re.escape(OPTIMIZER_PREFIX) + ".*")
    if foreign:
        patterns += _FOREIGN
    return re.compile("|".join(patterns))


def model_tensors(run: TrainingRun) -> list[ShardedTensor]:
    """Boxes of all weights and persistent buffers of this rank; parameters under way are waited for."""
    complete_parameters(run.model)
    return [box for chunk in run.model for box in sharded_model_state(chunk, run.model_config)]


def optimizer_tensors(run: TrainingRun) -> list[ShardedTensor]:
    """Boxes of the optimizer's tensors, cut as their parameters are; of a sharded one those that this rank keeps."""
    boxes = []
    optimizer: MegatronOptimizer = run.optimizer
    for name, param, tensors, flat_range in optimizer.named_state():
        for kind, tensor in tensors.items():
            place = stacked_key(name, run.model_config, prefix=f"{OPTIMIZER_PREFIX}{kind}.")
            if tensor.dim() == 0:
                boxes += place.boxes(tensor)
            elif flat_range is None:
                boxes += place.boxes(tensor, param)
            else:
                boxes += place.flat_boxes(tensor, flat_range, param)
    return boxes


def rng_tensors() -> dict[str, ShardedTensor]:
    """Generator states of this rank by name; other ranks have other keys."""
    return {name: replicated(f"{RNG_PREFIX}{get_rank()}.{name}", data) for name, data in pack_rng_state().items()}


def saved_tensors(run: TrainingRun) -> list[ShardedTensor]:
    """Everything that a save writes, as --no-save-optim and --no-save-rng allow."""
    tensors = model_tensors(run)
    if not run.args.no_save_optim:
        tensors += optimizer_tensors(run)
    if not run.args.no_save_rng:
        tensors += rng_tensors().values()
    return tensors


def common_state(run: TrainingRun) -> dict[str, Any]:
    """Everything that is no tensor; equal on all ranks, JSON."""
    scalars = run.optimizer.state_dict()
    return {
        "format_version": FORMAT_VERSION,
        "train_state": asdict(run.state),
        "scheduler": run.scheduler.state_dict(),
        "grad_scaler": scalars["grad_scaler"],
        "args": dict(_plain_args(run.args)),
        "world_size": get_world_size(),
        "device": run.device.type,
    }


def _plain_args(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(args).items()):
        if _is_plain(value):
            yield name, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def restore_counters(run: TrainingRun, common: dict[str, Any]) -> None:
    """Continue counting where the saved run stopped."""
    run.state = TrainState(**common["train_state"])
