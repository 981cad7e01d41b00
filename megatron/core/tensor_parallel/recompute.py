"""Parts of the model whose activations are computed again in backward: two ways.

`checkpoint` runs a part without recording and keeps its inputs; backward runs it once more, now recording, and goes on
through what it recorded:

    forward    inputs --(no graph)--> outputs         kept: inputs, random states
    backward   inputs --(graph)-----> outputs, then backward through the graph

The second pass draws the numbers of the first, its weight gradients go to the queue that was active in the first, and
afterwards the random states are as if it had not happened. Whatever counts or logs does so in the pass that records.

`recomputed_on_use` is for a cheap result of which a later product keeps a copy (a norm, an activation): while the
context is open, autograd keeps a note in place of that tensor, and the tensor is made again when backward reads it. No
second graph is built, and nothing but the function itself is run.

Legend: W ranks of a tensor-parallel group.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.configs.recompute import RecomputeConfig, RecomputeModule
from megatron.core.deferred_wgrad import WgradQueue, active_queue, deferring
from megatron.core.tensor_parallel.random import DeviceRngState, get_cuda_rng_tracker, replayed
from megatron.core.utils.collectives import all_gather
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_size

Part = Callable[..., torch.Tensor]


def recomputes(config: RecomputeConfig, module: RecomputeModule) -> bool:
    """True if selective recompute covers `module`."""
    return config.recompute_granularity == "selective" and module in (config.recompute_modules or ())


def layer_spans(config: RecomputeConfig, num_layers: int) -> list[tuple[range, bool]]:
    """Cut the layers of a chunk into spans that run, and are recomputed if True, as one."""
    if config.recompute_granularity != "full" or config.recompute_num_layers is None:
        return [(range(num_layers), False)]
    step = config.recompute_num_layers
    if config.recompute_method == "uniform":
        return [(range(first, min(first + step, num_layers)), True) for first in range(0, num_layers, step)]
    recomputed = min(step, num_layers)
    singles = [(range(layer, layer + 1), True) for layer in range(recomputed)]
    return [*singles, (range(recomputed, num_layers), False)] if recomputed < num_layers else singles


def checkpoint(
    part: Part,
    *inputs: torch.Tensor,
    draws: bool = True,
    share_over: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return part(*inputs), keeping the inputs alone.

    Shapes: inputs [...], the first one often [s, b, h] -> one tensor [...].
    Memory: the inputs; of the first one only the slice of this rank, 1 / W, with `share_over`.
    Host:   no synchronisation; `draws` False leaves the random states alone, as a graph capture demands.
    Grad:   inputs and every parameter that the part uses.
    """
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        return part(*inputs)
    states = DeviceRngState(get_cuda_rng_tracker().device) if draws else None
    group = share_over if group_size(share_over) > 1 else None
    return _Checkpoint.apply(_Rerun(part, states, active_queue(), group), *inputs)


@dataclass(frozen=True)
class _Rerun:
    """What the second pass needs beside its inputs."""

    part: Part
    states: DeviceRngState | None
    queue: WgradQueue | None
    group: dist.ProcessGroup | None

    def run(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Run the part again, recording: inputs [any] -> output [any]."""
        same_numbers = nullcontext() if self.states is None else replayed(self.states)
        with torch.enable_grad(), deferring(self.queue), same_numbers:
            return self.part(*inputs)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rerun: _Rerun, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.rerun, ctx.shape = rerun, inputs[0].shape
        first = inputs[0] if rerun.group is None else _own_slice(inputs[0], rerun.group)
        ctx.save_for_backward(first, *inputs[1:])
        return rerun.part(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, *others = ctx.saved_tensors
        if ctx.rerun.group is not None:
            first = _all_slices(first, ctx.rerun.group).view(ctx.shape)
        needed = ctx.needs_input_grad[1:]
        inputs = [kept.detach().requires_grad_(needs) for kept, needs in zip((first, *others), needed, strict=True)]
        output = ctx.rerun.run(inputs)
        torch.autograd.backward(output, grads[0])
        return None, *(tensor.grad for tensor in inputs)


def _own_slice(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Slice of this rank, a copy: [...] -> [numel / W]."""
    size = divide(tensor.numel(), group.size())
    return tensor.detach().reshape(-1).narrow(0, group.rank() * size, size).clone()


def _all_slices(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The slices of all ranks one after the other: [numel / W] -> [numel]."""
    whole = own.new_empty(own.numel() * group.size())
    all_gather(whole, own, group)
    return whole


def recomputed_on_use(
    result: torch.Tensor, function: Callable[[], torch.Tensor], is_active: bool = True
) -> AbstractContextManager[None]:
    """While the context is open, autograd keeps a note in place of `result` [any]; `function` makes it again.

    `function` must give the same bits and hold what it needs, detached. Only what is kept of `result` inside the
    context is replaced: the function's own inputs must be kept by whoever made them.
    """
    return _Forgotten(result, function).hooks() if is_active and torch.is_grad_enabled() else nullcontext()


class _Forgotten:
    """A tensor that can be made again, and the notes that autograd has of it."""

    def __init__(self, result: torch.Tensor, function: Callable[[], torch.Tensor]) -> None:
        self._address = result.untyped_storage().data_ptr()
        self._is_empty = result.numel() == 0
        self._function = function
        self._num_notes = 0
        self._again: torch.Tensor | None = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Let autograd ask this object about all that it keeps."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, self._fetch):
            yield

    def _keep(self, tensor: torch.Tensor) -> Any:
        """Take what autograd wants to keep [any]; a note if it lies in the forgotten storage."""
        if self._is_empty or tensor.untyped_storage().data_ptr() != self._address:
            return tensor
        self._num_notes += 1
        return _Note(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _fetch(self, kept: Any) -> torch.Tensor:
        """Give back what was kept; the first note computes, the last one lets go."""
        if not isinstance(kept, _Note):
            return kept
        if self._again is None:
            with torch.no_grad():
                self._again = self._function()
        view = self._again.as_strided(kept.size, kept.stride, kept.offset)
        self._num_notes -= 1
        if self._num_notes == 0:
            self._again = None
        return view


@dataclass(frozen=True)
class _Note:
    """Where a kept tensor lies in the forgotten storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
