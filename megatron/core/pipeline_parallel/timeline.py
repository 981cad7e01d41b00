"""When each action of each rank runs, if every rank works through its list as soon as its inputs are there.

Messages take no time and nobody waits to send. Times are whole numbers: a forward takes 1, a backward 2. A W, the
weight gradients of one layer, counts as part of its backward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import Action, ActionKind, PlanShape

MESSAGES = (ActionKind.SEND, ActionKind.RECV)
COST = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.WGRAD: 0, ActionKind.RECOMPUTE: 1}

Done = dict[tuple[ActionKind, int, int], int]
"""(kind, stage, microbatch) -> time at which it ended."""


@dataclass(frozen=True)
class Span:
    """One action with its begin and end."""

    action: Action
    start: int
    end: int


def make_timeline(plans: Sequence[Sequence[Action]], shape: PlanShape) -> list[list[Span]]:
    """Times of all but the messages, for each rank; `plans[r]` is the list of pipeline rank r.

    Raises: ValueError if the ranks wait for each other, naming what each one waits for.
    """
    work = [[action for action in plan if action.kind not in MESSAGES] for plan in plans]
    spans: list[list[Span]] = [[] for _ in plans]
    done: Done = {}
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, actions in enumerate(work):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                inputs = list(_inputs(action, rank, shape))
                if any(key not in done for key in inputs):
                    break
                start = max([done[key] for key in inputs] + [span.end for span in spans[rank][-1:]], default=0)
                end = start + sum(COST[part.kind] for part in action.parts)
                spans[rank].append(Span(action, start, end))
                done.update({_key(part, rank, shape): end for part in action.parts})
                is_moving = True
    stuck = [f"rank {r}: {actions[len(spans[r])]}" for r, actions in enumerate(work) if len(spans[r]) < len(actions)]
    if stuck:
        raise ValueError(f"the ranks wait for each other: {'; '.join(stuck)}")
    return spans


def _key(action: Action, rank: int, shape: PlanShape) -> tuple[ActionKind, int, int]:
    return action.kind, action.chunk * shape.pp_size + rank, action.microbatch


def _inputs(action: Action, rank: int, shape: PlanShape) -> Iterator[tuple[ActionKind, int, int]]:
    """What must have ended before `action` can begin, its own rank's order aside."""
    for part in action.parts:
        kind, stage, microbatch = _key(part, rank, shape)
        if kind is ActionKind.FORWARD:
            if stage > 0:
                yield kind, stage - 1, microbatch
        elif kind is ActionKind.BACKWARD:
            yield ActionKind.FORWARD, stage, microbatch
            if stage < shape.num_stages - 1:
                yield kind, stage + 1, microbatch
        else:
            yield (ActionKind.BACKWARD if kind is ActionKind.WGRAD else ActionKind.FORWARD), stage, microbatch


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """Idle share of all ranks' time, from the first action to the last."""
    total = max((span.end for rank in spans for span in rank), default=0) * len(spans)
    busy = sum(span.end - span.start for rank in spans for span in rank)
    return 1 - busy / total if total else 0.0
