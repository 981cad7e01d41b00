"""Which parameters share a learning rate and a weight decay.

A group's key is (weight decay multiplier, decoupled learning rate or not, expert or not). The keys are gathered over
all ranks and sorted, so that every rank has the same groups in the same order, with or without parameters of its own:
the scheduler and the log then agree everywhere, and a checkpoint of one layout fits another.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.collectives import all_gather_object

GroupKey = tuple[float, bool, bool]

QK_NORM_MARKS = (".q_layernorm.", ".k_layernorm.")


def group_key(name: str, param: torch.nn.Parameter, config: OptimizerConfig) -> GroupKey:
    """Return (weight decay multiplier, has the decoupled learning rate, is expert) of one parameter."""
    is_qk_norm = any(mark in f".{name}" for mark in QK_NORM_MARKS)
    is_exempt = name.endswith(".bias") or param.dim() == 1
    if config.apply_wd_to_qk_layernorm and is_qk_norm:
        is_exempt = False
    is_decoupled = config.decoupled_lr is not None and getattr(param, "is_embedding_or_output_parameter", False)
    return (0.0 if is_exempt else 1.0, is_decoupled, not getattr(param, "allreduce", True))


def build_param_groups(
    named_params: Iterable[tuple[str, torch.nn.Parameter]],
    config: OptimizerConfig,
    pg_collection: ProcessGroupCollection,
) -> list[dict[str, Any]]:
    """Sort the trainable parameters into groups, equal lists on all ranks; communicates once.

    A group holds `params`, `names`, `wd_mult`, `is_decoupled_lr`, `is_expert_parallel`, `lr`, `weight_decay`, and, if
    its rate is decoupled, its own `max_lr` and `min_lr`.
    """
    members: dict[GroupKey, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, param in named_params:
        if param.requires_grad:
            members.setdefault(group_key(name, param, config), []).append((name, param))
    keys = _keys_of_all_ranks(set(members), pg_collection.world)
    return [_group(key, members.get(key, []), config) for key in keys]


def _keys_of_all_ranks(keys: set[GroupKey], world: dist.ProcessGroup | None) -> list[GroupKey]:
    gathered = all_gather_object(sorted(keys), world)
    return sorted({key for rank_keys in gathered for key in rank_keys}, reverse=True)


def _group(key: GroupKey, members: list[tuple[str, torch.nn.Parameter]], config: OptimizerConfig) -> dict[str, Any]:
    wd_mult, is_decoupled, is_expert = key
    group: dict[str, Any] = {
        "params": [param for _, param in members],
        "names": [name for name, _ in members],
        "wd_mult": wd_mult,
        "is_decoupled_lr": is_decoupled,
        "is_expert_parallel": is_expert,
        "lr": config.decoupled_lr if is_decoupled else config.lr,
        "weight_decay": config.weight_decay * wd_mult,
    }
    if is_decoupled:
        group["max_lr"] = config.decoupled_lr
        group["min_lr"] = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return group
