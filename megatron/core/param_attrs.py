"""What a parameter is: how it starts, how it is cut, and which ranks reduce its gradient.

Layers allocate their weights empty and record a `ParamAttrs` here once. Weight initialisation reads the recipe, the
optimizer and gradient code read the plain attributes that Megatron users know (`allreduce`, `partition_dim`, ...).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

_ATTRS_NAME = "megatron_attrs"
_AWAITS_NAME = "megatron_awaits_init"


@dataclass(frozen=True)
class InitSpec:
    """Distribution of the initial values, drawn for the whole unsharded tensor."""

    kind: Literal["normal", "zeros", "ones", "custom"]
    """`custom` calls `function` on the whole fp32 tensor under a generator seeded for this parameter."""

    std: float = 0.0
    """Standard deviation of `normal`."""

    function: Callable[[torch.Tensor], object] | None = None
    """In-place initialiser of `custom`."""

    def __post_init__(self) -> None:
        if (self.kind == "custom") != (self.function is not None):
            raise ValueError(f"kind={self.kind!r}, function={self.function}: `custom`, and only it, takes a function")


@dataclass(frozen=True)
class ParamAttrs:
    """Everything the rest of the tree may ask about one parameter."""

    init: InitSpec
    """How the unsharded tensor starts."""

    partition_dim: int | None = None
    """Dimension cut over tensor-parallel ranks; None for a replicated parameter."""

    num_parts: int = 1
    """Equal parts along `partition_dim` that are cut one by one (gated fc1: gate and up, so 2)."""

    partition_rank: int = 0
    """Which slice this rank holds."""

    is_expert: bool = False
    """True for routed experts, which exist once per expert-data-parallel group."""

    sequence_parallel: bool = False
    """True if each tensor-parallel rank sees only a shard of the sequence, so that gradients are summed over TP."""

    is_embedding_or_output: bool = False
    """True for the word embedding and the output matrix (decoupled learning rate)."""

    full_shape: tuple[int, ...] | None = None
    """Shape before slicing; None means the parameter is the whole tensor."""


def set_param_attrs(param: torch.nn.Parameter, attrs: ParamAttrs, allreduce: bool | None = None) -> torch.nn.Parameter:
    """Record `attrs` on `param` [any], mark it as not yet initialised, and return it.

    `allreduce=False` sends the gradient to the expert groups. Its default is False for experts; a module passes True
    when expert and dense groups are the same. Raises: AssertionError if attributes were recorded before.
    """
    known = getattr(param, _ATTRS_NAME, None)
    assert known is None, f"parameter {tuple(param.shape)} already has attributes {known}, refusing {attrs}"
    setattr(param, _ATTRS_NAME, attrs)
    setattr(param, _AWAITS_NAME, True)
    plain = {
        "allreduce": (not attrs.is_expert) if allreduce is None else allreduce,
        "tensor_model_parallel": attrs.partition_dim is not None,
        "partition_dim": -1 if attrs.partition_dim is None else attrs.partition_dim,
        "partition_stride": attrs.num_parts,
        "sequence_parallel": attrs.sequence_parallel,
        "is_embedding_or_output_parameter": attrs.is_embedding_or_output,
    }
    for name, value in plain.items():
        setattr(param, name, value)
    return param


def sum_gradient_over_tp(param: torch.nn.Parameter) -> None:
    """Note that each tensor-parallel rank has a summand of the gradient of `param` [any], with its own heads, say."""
    param.sum_gradient_over_tp = True  # type: ignore[attr-defined]


def needs_sum_over_tp(param: torch.nn.Parameter) -> bool:
    """True if the gradient of the replicated `param` [any] is complete only after a sum over tensor-parallel ranks."""
    return getattr(param, "sequence_parallel", False) or getattr(param, "sum_gradient_over_tp", False)


def mark_real_rows(param: torch.nn.Parameter, count: int) -> None:
    """Note that rows from `count` on of the vocabulary matrix `param` [v, h] are filler: a checkpoint may lack them."""
    param.num_real_rows = count  # type: ignore[attr-defined]


def num_real_rows(param: torch.nn.Parameter) -> int | None:
    """Rows of the whole matrix `param` [any] that every checkpoint of it holds; None if it holds them all."""
    return getattr(param, "num_real_rows", None)


def mark_shared_embedding(param: torch.nn.Parameter, is_copy: bool) -> None:
    """Note that first and last pipeline stage hold the same matrix `param` [v, h]: gradients are summed over both.

    `is_copy` marks the one of the last stage, which counts in no norm.
    """
    param.shared_embedding = True  # type: ignore[attr-defined]
    param.shared = is_copy  # type: ignore[attr-defined]


def is_shared_embedding(param: torch.nn.Parameter) -> bool:
    """True for the matrix `param` [any] of which first and last pipeline stage have a copy each."""
    return getattr(param, "shared_embedding", False)


def is_second_copy(param: torch.nn.Parameter) -> bool:
    """True if another pipeline stage has the copy of `param` [any] that counts."""
    return getattr(param, "shared", False)


def has_param_attrs(param: torch.nn.Parameter) -> bool:
    """True if a layer of this tree allocated `param` [any]."""
    return hasattr(param, _ATTRS_NAME)


def param_attrs(param: torch.nn.Parameter) -> ParamAttrs:
    """Return what `set_param_attrs` recorded on `param` [any]."""
    attrs = getattr(param, _ATTRS_NAME, None)
    assert attrs is not None, f"parameter {tuple(param.shape)} has no attributes; allocate it with `new_parameter`"
    return attrs


def awaits_init(param: torch.nn.Parameter) -> bool:
    """True between allocation and initialisation of `param` [any]."""
    return getattr(param, _AWAITS_NAME, False)


def mark_initialized(param: torch.nn.Parameter) -> None:
    """Note that `param` [any] holds its initial values, so that wrappers built later leave it alone."""
    setattr(param, _AWAITS_NAME, False)
