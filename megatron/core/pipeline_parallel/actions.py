"""The vocabulary of schedules: what one rank does, one action after the other.

A *stage* is a run of layers between two messages. Stages are dealt out in turn: chunk c of pipeline rank r is stage
c * pp_size + r. Activations move to the next stage, gradients to the one before.
"""

import enum
from dataclasses import dataclass
from typing import Optional


class ActionKind(enum.Enum):
    """What is done for one microbatch in one model chunk."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the input, and of the weights that no W is left for."""
    WGRAD = "W"
    """Gradients of the weights that the backward put off to the very end: those of the chunk's first layer."""
    RECOMPUTE = "R"
    """Forward once more, before the backward, of what was not kept."""
    SEND = "send"
    RECV = "recv"
    """The message is on its way from here on; it is waited for by the action that reads it."""
    OVERLAP = "FB"
    """A forward and a backward that hide each other's communication."""


class Direction(enum.Enum):
    """What a message carries."""

    ACTIVATION = "F"
    """Output of a stage, to the next one."""
    GRADIENT = "B"
    """Gradient of a stage's input, to the stage before."""


@dataclass(frozen=True)
class Action:
    """One entry of a plan; prints as F0.3 for the forward of microbatch 3 in chunk 0."""

    kind: ActionKind
    chunk: int
    """Chunk of this rank: of a message the one that made it (SEND) or reads it (RECV), of a pair the forward's."""
    microbatch: int
    direction: Direction | None = None
    """Of SEND and RECV only."""
    peer: int | None = None
    """Pipeline rank at the other end of SEND and RECV."""
    backward: Optional["Action"] = None
    """Of OVERLAP only: the backward beside the forward of `chunk` and `microbatch`."""

    def __post_init__(self) -> None:
        is_message = self.kind in (ActionKind.SEND, ActionKind.RECV)
        assert (self.direction is not None) == (self.peer is not None) == is_message, f"{self.kind}: a peer is missing"
        assert (self.backward is not None) == (self.kind is ActionKind.OVERLAP), f"{self.kind}: only a pair has two"

    @property
    def parts(self) -> tuple["Action", ...]:
        """The forward and the backward of a pair; any other action alone."""
        if self.backward is None:
            return (self,)
        return Action(ActionKind.FORWARD, self.chunk, self.microbatch), self.backward

    def __str__(self) -> str:
        if self.direction is not None:
            return f"{self.kind.value}({self.direction.value}{self.chunk}.{self.microbatch},{self.peer})"
        if self.backward is not None:
            return "|".join(str(part) for part in self.parts)
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


def forward(chunk: int, microbatch: int) -> Action:
    """F of one microbatch in one chunk."""
    return Action(ActionKind.FORWARD, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Action:
    """B of one microbatch in one chunk."""
    return Action(ActionKind.BACKWARD, chunk, microbatch)


def weight_grads(chunk: int, microbatch: int) -> Action:
    """W of one microbatch in one chunk."""
    return Action(ActionKind.WGRAD, chunk, microbatch)


def overlap(first: Action, second: Action) -> Action:
    """The forward `first` beside the backward `second`."""
    assert (first.kind, second.kind) == (ActionKind.FORWARD, ActionKind.BACKWARD), f"{first} beside {second}"
    return Action(ActionKind.OVERLAP, first.chunk, first.microbatch, backward=second)


@dataclass(frozen=True)
class PlanShape:
    """All that a plan may depend on."""

    num_microbatches: int
    forward_only: bool = False
    num_chunks: int = 1
    pp_size: int = 1
    pp_rank: int = 0
    microbatch_group_size: int | None = None
    """Microbatches that run through one chunk before the next chunk has its turn; None is `pp_size`."""
    delays_wgrad: bool = False
    """Weight gradients are put off; a plan with messages lets the last of each backward hide them."""

    @property
    def group_size(self) -> int:
        """The microbatch group size in effect."""
        return self.pp_size if self.microbatch_group_size is None else self.microbatch_group_size

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp_size * self.num_chunks

    def stage(self, chunk: int) -> int:
        """Stage number of a chunk of this rank."""
        return chunk * self.pp_size + self.pp_rank
