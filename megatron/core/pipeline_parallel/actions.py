"""The vocabulary of schedules: what one rank does, one action after the other."""

import enum
from dataclasses import dataclass


class ActionKind(enum.Enum):
    """What is done for one microbatch in one model chunk."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One entry of a plan; prints as F0.3 for the forward of microbatch 3 in chunk 0."""

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True)
class PlanShape:
    """All that a plan may depend on."""

    num_microbatches: int
    forward_only: bool = False
    num_chunks: int = 1
    pp_size: int = 1
    pp_rank: int = 0
