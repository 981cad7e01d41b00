"""Norms, zero counts and clipping over the gradients (or weights) of the whole, unsharded model.

Each element of the unsharded model counts once. Replicas over data parallel ranks are left out by reducing over the
model parallel groups only; replicas over (expert) tensor parallel ranks are counted by rank 0 of that group:

    dense    own parameters, reduced over TP x PP            groups.mp
    expert   own parameters, reduced over ETP x EP x PP      groups.tp_ep_pp

Both reductions are entered by every rank, also by one that holds no parameter of the kind.

Squares are summed in fp64 and the norm is rounded once, so that its bits do not depend on how gradients are cut: fp64
sums in another order differ by 1e-16, an fp32 result then differs in one step out of 1e8.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron.core.param_attrs import is_second_copy
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.collectives import MAX, SUM, all_reduce
from megatron.core.utils.groups import group_rank

CLIP_EPS = 1e-6
"""Added to the norm in the divisor, so that a norm of zero gives a finite coefficient."""


@dataclass
class UniqueTensors:
    """The tensors that this rank contributes, by the group over which their sums are completed."""

    dense: list[torch.Tensor] = field(default_factory=list)
    expert: list[torch.Tensor] = field(default_factory=list)


def unique_tensors(
    pairs: Iterable[tuple[torch.nn.Parameter, torch.Tensor]], groups: ProcessGroupCollection
) -> UniqueTensors:
    """Pick from (parameter, tensor of it) pairs the tensors that count on this rank.

    A tied parameter counts once, also if two pipeline stages have a copy each.
    """
    unique = UniqueTensors()
    seen: set[torch.nn.Parameter] = set()
    for param, tensor in pairs:
        if param in seen or is_second_copy(param):
            continue
        seen.add(param)
        is_expert = not getattr(param, "allreduce", True)
        is_sharded = getattr(param, "tensor_model_parallel", False)
        if is_sharded or group_rank(groups.expt_tp if is_expert else groups.tp) == 0:
            (unique.expert if is_expert else unique.dense).append(tensor)
    return unique


def total_norm(
    tensors: UniqueTensors, groups: ProcessGroupCollection, device: torch.device, norm_type: float = 2.0
) -> torch.Tensor:
    """Norm [] over all elements, on `device`; fp32, or fp64 if the tensors are.

    Host: no synchronisation. Raises: ValueError for a norm type other than 2 and infinity.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type}: only 2 and inf are defined; use one of these.")
    dense = _partial_norm(tensors.dense, device, norm_type)
    expert = _partial_norm(tensors.expert, device, norm_type)
    op = MAX if norm_type == math.inf else SUM
    all_reduce(dense, groups.mp, op)
    all_reduce(expert, groups.tp_ep_pp, op)
    if norm_type == math.inf:
        return torch.maximum(dense, expert).squeeze(0).to(_norm_dtype(tensors))
    return (dense + expert).sqrt().squeeze(0).to(_norm_dtype(tensors))


def clip_coefficient(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """What gradients are multiplied by: max_norm / norm where that is below 1, else 1 exactly; [] -> []."""
    coefficient = max_norm / (norm + CLIP_EPS)
    return torch.where(coefficient < 1.0, coefficient, torch.ones_like(coefficient))


def clip_by_total_norm(grads: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale `grads` [...] in place by max_norm / norm [] where that is below 1; no host read, exact otherwise."""
    if grads:
        torch._foreach_mul_(list(grads), clip_coefficient(max_norm, norm))


def count_zeros(tensors: UniqueTensors, groups: ProcessGroupCollection, device: torch.device) -> torch.Tensor:
    """Number [] of elements that are zero, int64, on `device`."""
    dense = _partial_zeros(tensors.dense, device)
    expert = _partial_zeros(tensors.expert, device)
    all_reduce(dense, groups.mp)
    all_reduce(expert, groups.tp_ep_pp)
    return (dense + expert).squeeze(0)


def params_norm(
    params: Iterable[torch.nn.Parameter], groups: ProcessGroupCollection, device: torch.device
) -> torch.Tensor:
    """L2 norm [] of the weights of the unsharded model, trainable or not."""
    return total_norm(unique_tensors(((param, param.detach()) for param in params), groups), groups, device)


def _norm_dtype(tensors: UniqueTensors) -> torch.dtype:
    is_fp64 = any(tensor.dtype == torch.float64 for tensor in tensors.dense + tensors.expert)
    return torch.float64 if is_fp64 else torch.float32


def _partial_norm(tensors: list[torch.Tensor], device: torch.device, norm_type: float) -> torch.Tensor:
    """Sum of squares, or maximum, of this rank [1]; always fp64 so that ranks without tensors send the same dtype."""
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    if not filled:
        return torch.zeros(1, dtype=torch.float64, device=device)
    stacked = torch.stack(torch._foreach_norm(filled, norm_type, dtype=torch.float64))
    return (stacked.max() if norm_type == math.inf else stacked.square().sum()).reshape(1)


def _partial_zeros(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    for tensor in tensors:
        zeros += tensor.numel() - torch.count_nonzero(tensor)
    return zeros
