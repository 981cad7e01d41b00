"""One stage of one microbatch: its stream, its inputs cut out of autograd, and what has to outlive it.

    outputs   <-record-- [ entry -> run -> edges ]      <-wait-- inputs               forward
    gradients <-record-- [ entry <- autograd <- edges ] <-wait-- output gradients     backward
                         [ queued products ]                                          weight gradients

A node waits for the events of what it is given and for nothing else; within a stream the order of submission is enough.
Weight gradients run on the node's own stream after its input gradients. No event of the microbatch is recorded behind
them, so that they delay nobody: they cover what the other stream does meanwhile.

Memory. A leaf would hold its input until backward, and an output would hold itself. A node keeps neither: inputs come
in through `_Entry`, which keeps no data, outputs are remembered as edges of the graph. A tensor between two stages thus
lives exactly as long as somebody needs it: autograd if an operation saved it, a later stage that is still to read it,
or a stream that has not read it yet (`streams.hold`).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core import streams
from megatron.core.deferred_wgrad import WgradQueue, deferring
from megatron.core.streams import Event, Role


class Handed(NamedTuple):
    """A tensor on its way between stages."""

    tensor: torch.Tensor
    """Detached from the graph of the stage that made it."""
    owner: Role
    """The stream whose memory it is."""
    event: Event
    """Recorded behind the work that made it."""


Values = Sequence[Handed | None]


def hand_over(tensor: torch.Tensor) -> Handed:
    """Make what the current stream has just produced, `tensor` [...] of its own memory, ready for a node."""
    return Handed(tensor.detach(), streams.current_role(), streams.record())


class StageNode:
    """Runs `run` on the stream of `role`, forward and backward.

    Args:
        name: Names microbatch, layer and stage in reports.
        run: Maps tensors to tensors or None, one for each input and output of the stage.
        keeps: Positions of inputs that autograd keeps for backward, as their owner declares. If such an input belongs
            to the other stream, the node holds it until that stream has waited for the last product that reads it.
        queue: Takes the weight gradients; None computes them within backward.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        run: Callable[..., Sequence[torch.Tensor | None]],
        keeps: Collection[int] = (),
        queue: WgradQueue | None = None,
    ) -> None:
        self.name, self.role, self.run = name, role, run
        self.keeps, self.queue = keeps, queue
        self._boxes: list[_GradBox | None] = []
        self._edges: list[GradientEdge | None] = []
        self._kept: list[Any] = []

    def forward(self, *inputs: Handed | None, is_kept: bool = True) -> list[Handed | None]:
        """Run the stage; without `is_kept` nothing is remembered for a backward."""
        with streams.on(self.role, f"F {self.name}"):
            _wait_for(inputs, self.role)
            self._boxes = [None if given is None else _GradBox() for given in inputs]
            with torch.set_grad_enabled(is_kept), deferring(self.queue if is_kept else None):
                outputs = self.run(*map(_enter, self._boxes, inputs))
            self._edges = [_edge_of(output) for output in outputs]
            kept = self.keeps if is_kept else ()
            self._kept = [given for i, given in enumerate(inputs) if i in kept and self._is_foreign(given)]
            for i, given in enumerate(inputs):
                if i not in kept and given is not None:
                    streams.hold(given.tensor, given.owner)
            event = streams.record()
            return [_handed(output, inputs, self.role, event) for output in outputs]

    def backward(self, *grads: Handed | None) -> list[Handed | None]:
        """Gradients of the outputs -> gradients of the inputs; None where there is none."""
        with streams.on(self.role, f"B {self.name}"):
            _wait_for(grads, self.role)
            roots = [
                (edge, grad.tensor)
                for edge, grad in zip(self._edges, grads, strict=True)
                if edge is not None and grad is not None
            ]
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
            found = [None if box is None else box.grad for box in self._boxes]
            self._boxes, self._edges = [], []
            self._kept += filter(self._is_foreign, grads)
            if not self.queue:
                self._let_go()
            event = streams.record()
            return [_handed(grad, grads, self.role, event) for grad in found]

    def weight_grads(self) -> int:
        """Compute the weight gradients that backward put off; returns their number."""
        if not self.queue:
            return 0
        waiting = len(self.queue)
        with streams.on(self.role, f"W {self.name}"):
            self.queue.flush()
            self._let_go()
        return waiting

    def _is_foreign(self, value: Handed | None) -> bool:
        """True for memory of the other stream, which it may reuse as soon as nobody refers to it."""
        return value is not None and value.owner is not self.role

    def _let_go(self) -> None:
        """The current stream has read for the last time what this node kept."""
        for kept in self._kept:
            streams.hold(kept.tensor, kept.owner)
        self._kept = []


class _GradBox:
    """Where the gradient of one input arrives."""

    grad: torch.Tensor | None = None


class _Entry(torch.autograd.Function):
    """Lets a tensor [...] into the graph of a stage and takes its gradient out, without holding the tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, box: _GradBox, data: torch.Tensor) -> torch.Tensor:
        ctx.box = box
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.box.grad = grad
        return None, None, None


# What makes autograd record an entry; it never receives a gradient.
_ANCHOR = torch.empty(0, requires_grad=True)


def _enter(box: _GradBox | None, given: Handed | None) -> torch.Tensor | None:
    if given is None:
        return None
    return _Entry.apply(_ANCHOR, box, given.tensor) if torch.is_grad_enabled() else given.tensor


def _edge_of(output: torch.Tensor | None) -> GradientEdge | None:
    """Return the place in the graph that made `output` [...], if it has a gradient."""
    return get_gradient_edge(output) if output is not None and output.requires_grad else None


def _wait_for(values: Values, role: Role) -> None:
    """Wait for what the other stream has made, once for each event."""
    events = {id(value.event): value.event for value in values if value is not None and value.event.role is not role}
    for event in events.values():
        streams.wait(event)


def _handed(tensor: torch.Tensor | None, given: Values, role: Role, event: Event) -> Handed | None:
    """Hand on what `role` made [...]; a view of something given stays the memory of whoever owns that."""
    if tensor is None:
        return None
    address = tensor.untyped_storage().data_ptr()
    owners = [v.owner for v in given if v is not None and v.tensor.untyped_storage().data_ptr() == address]
    return Handed(tensor.detach(), owners[0] if owners else role, event)
