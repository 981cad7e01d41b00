"""Puts the messages between stages into the lists of all ranks.

A schedule says in which order a rank computes; where it sends and receives follows from that. All ranks' lists are cut
out of one common order, the timeline: an action stands at its start, a message at the end of the action that made it,
messages before actions that start at the same time. Hence

    every message is sent at once after it was made, and its reception begins at that time too;
    both ends list their messages in the same order, and no rank ever waits for something that comes later in the
    common order: the lists cannot deadlock, not even if every message blocked.
"""

from collections.abc import Iterator, Sequence

from megatron.core.pipeline_parallel.actions import Action, ActionKind, Direction, PlanShape
from megatron.core.pipeline_parallel.timeline import make_timeline


def add_transfers(plans: Sequence[Sequence[Action]], shape: PlanShape) -> list[list[Action]]:
    """Return the lists of all ranks with SEND and RECV in them; `plans[r]` holds what pipeline rank r computes."""
    spans = make_timeline(plans, shape)
    placed: list[list[tuple[int, bool, int, Action]]] = [[] for _ in plans]  # time, is no message, sender, action
    for rank, timed in enumerate(spans):
        for span in timed:
            placed[rank].append((span.start, True, rank, span.action))
            for part in span.action.parts:
                for to, send, recv in _messages(part, rank, shape):
                    placed[rank].append((span.end, False, rank, send))
                    placed[to].append((span.end, False, rank, recv))
    for entries in placed:
        entries.sort(key=lambda entry: entry[:3])
    return [[entry[3] for entry in entries] for entries in placed]


def _messages(action: Action, rank: int, shape: PlanShape) -> Iterator[tuple[int, Action, Action]]:
    """(receiver, SEND, RECV) of the message that `action` makes, if any."""
    if action.kind is ActionKind.FORWARD:
        direction, step = Direction.ACTIVATION, 1
    elif action.kind is ActionKind.BACKWARD:
        direction, step = Direction.GRADIENT, -1
    else:
        return
    stage = action.chunk * shape.pp_size + rank + step
    if 0 <= stage < shape.num_stages:
        chunk, to = divmod(stage, shape.pp_size)
        send = Action(ActionKind.SEND, action.chunk, action.microbatch, direction, peer=to)
        yield to, send, Action(ActionKind.RECV, chunk, action.microbatch, direction, peer=rank)
