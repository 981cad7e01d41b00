"""Checks the lists of all ranks of a pipeline, whoever made them, without running anything.

    1. each forward once; in training each backward once and after it; an R before a backward, a W after it and after
       what it sends
    2. what a stage reads was received before, what another stage needs is sent after
    3. messages: every rank blocks at each until the other end reaches the same one; a rank that meets another message,
       or waits for ever, is an error
    4. no rank holds more activations than its schedule declares

Blocking is the strictest reading of a message. Lists that pass also run with messages that are only posted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron.core.pipeline_parallel.actions import Action, ActionKind, Direction, PlanShape
from megatron.core.pipeline_parallel.plans import PLANS, build_plans

Key = tuple[ActionKind, int, int]


class PlanError(ValueError):
    """A plan that cannot run, or not as declared."""


def check_schedule(name: str, shape: PlanShape) -> list[int]:
    """Check a registered schedule on all ranks; returns the peak of each."""
    declared = [PLANS[name].peak_in_flight(replace(shape, pp_rank=rank)) for rank in range(shape.pp_size)]
    return check_plans(build_plans(name, replace(shape, pp_rank=0)), shape, declared)


def check_plans(
    plans: Sequence[Sequence[Action]], shape: PlanShape, declared_peaks: Sequence[int] | None = None
) -> list[int]:
    """Check the lists of all ranks, `plans[r]` that of pipeline rank r; returns the peak in flight of each.

    Raises: PlanError that names the rank and the action.
    """
    assert len(plans) == shape.pp_size, f"{len(plans)} plans for {shape.pp_size} ranks"
    for rank, plan in enumerate(plans):
        _check_counts(plan, rank, shape)
        _check_order(plan, rank, shape)
    _check_messages(plans)
    peaks = [max(_in_flight(plan), default=0) for plan in plans]
    for rank, (peak, declared) in enumerate(zip(peaks, declared_peaks or peaks, strict=True)):
        if peak > declared and not shape.forward_only:
            raise PlanError(f"rank {rank}: {peak} microbatches in flight, {declared} declared")
    return peaks


def _work(plan: Sequence[Action]) -> list[Action]:
    """Actions with pairs taken apart."""
    return [part for action in plan for part in action.parts]


def _check_counts(plan: Sequence[Action], rank: int, shape: PlanShape) -> None:
    counts = Counter((action.kind, action.chunk, action.microbatch) for action in _work(plan) if action.peer is None)
    kinds = [ActionKind.FORWARD] if shape.forward_only else [ActionKind.FORWARD, ActionKind.BACKWARD]
    if any(kind is ActionKind.WGRAD for kind, _, _ in counts):
        kinds.append(ActionKind.WGRAD)
    for kind in kinds:
        for chunk in range(shape.num_chunks):
            for microbatch in range(shape.num_microbatches):
                found = counts.pop((kind, chunk, microbatch), 0)
                if found != 1:
                    raise PlanError(f"rank {rank}: {kind.value}{chunk}.{microbatch} runs {found} times")
    unknown = [f"{kind.value}{chunk}.{i}" for kind, chunk, i in counts if kind is not ActionKind.RECOMPUTE]
    if unknown:
        raise PlanError(f"rank {rank}: no such work in this step: {' '.join(unknown)}")


def _check_order(plan: Sequence[Action], rank: int, shape: PlanShape) -> None:
    """Rules 1 and 2."""
    done: set[Key | tuple[ActionKind, Direction, int, int]] = set()
    unsent: set[tuple[Direction, int, int]] = set()
    for action in _work(plan):
        chunk, microbatch = action.chunk, action.microbatch
        if action.direction is not None:
            message = (action.direction, chunk, microbatch)
            if action.kind is ActionKind.RECV:
                done.add((ActionKind.RECV, *message))
            elif message in unsent:
                unsent.remove(message)
            else:
                raise PlanError(f"rank {rank}: {action} sends what is not there, or sends it twice")
            continue
        for needed in _needs(action, rank, shape):
            if needed not in done:
                raise PlanError(f"rank {rank}: {action} comes before {_name(needed)}")
        if action.kind is ActionKind.WGRAD and (Direction.GRADIENT, chunk, microbatch) in unsent:
            raise PlanError(f"rank {rank}: {action} comes before the gradient is sent, and hides nothing")
        stage = chunk * shape.pp_size + rank
        if action.kind is ActionKind.FORWARD and stage < shape.num_stages - 1:
            unsent.add((Direction.ACTIVATION, chunk, microbatch))
        if action.kind is ActionKind.BACKWARD and stage > 0:
            unsent.add((Direction.GRADIENT, chunk, microbatch))
        done.add((action.kind, chunk, microbatch))
    if unsent:
        raise PlanError(
            f"rank {rank}: never sent: {' '.join(f'{d.value}{c}.{m}' for d, c, m in sorted(unsent, key=str))}"
        )


def _needs(action: Action, rank: int, shape: PlanShape) -> list[tuple]:
    """What must stand earlier in the list of the same rank."""
    chunk, microbatch = action.chunk, action.microbatch
    stage = chunk * shape.pp_size + rank
    needs: list[tuple] = []
    if action.kind is ActionKind.FORWARD and stage > 0:
        needs.append((ActionKind.RECV, Direction.ACTIVATION, chunk, microbatch))
    if action.kind in (ActionKind.BACKWARD, ActionKind.RECOMPUTE):
        needs.append((ActionKind.FORWARD, chunk, microbatch))
    if action.kind is ActionKind.BACKWARD and stage < shape.num_stages - 1:
        needs.append((ActionKind.RECV, Direction.GRADIENT, chunk, microbatch))
    if action.kind is ActionKind.WGRAD:
        needs.append((ActionKind.BACKWARD, chunk, microbatch))
    return needs


def _name(needed: tuple) -> str:
    kind, *rest = needed
    if kind is ActionKind.RECV:
        direction, chunk, microbatch = rest
        return f"{kind.value}({direction.value}{chunk}.{microbatch})"
    return f"{kind.value}{rest[0]}.{rest[1]}"


def _check_messages(plans: Sequence[Sequence[Action]]) -> None:
    """Rule 3: step through the messages of all ranks, both ends of one at a time."""
    queues = [[action for action in plan if action.direction is not None] for plan in plans]
    position = [0] * len(plans)

    def head(rank: int) -> Action | None:
        return queues[rank][position[rank]] if position[rank] < len(queues[rank]) else None

    is_moving = True
    while is_moving:
        is_moving = False
        for rank in range(len(plans)):
            while (send := head(rank)) is not None and send.kind is ActionKind.SEND:
                recv = head(send.peer or 0)
                if recv is None or recv.kind is not ActionKind.RECV or recv.peer != rank:
                    break
                _check_same(send, recv, rank, len(plans))
                position[rank] += 1
                position[send.peer or 0] += 1
                is_moving = True
    stuck = [f"rank {rank} at {head(rank)}" for rank in range(len(plans)) if head(rank) is not None]
    if stuck:
        raise PlanError(f"deadlock: {', '.join(stuck)}")


def _check_same(send: Action, recv: Action, rank: int, pp_size: int) -> None:
    """The stage that reads must be the neighbour of the one that made the message."""
    step = 1 if send.direction is Direction.ACTIVATION else -1
    stage_there = send.chunk * pp_size + rank + step
    expected = (send.direction, stage_there, send.microbatch)
    got = (recv.direction, recv.chunk * pp_size + (send.peer or 0), recv.microbatch)
    if expected != got:
        raise PlanError(f"rank {rank} is at {send}, rank {send.peer} at {recv}: not the same message")


def _in_flight(plan: Sequence[Action]) -> list[int]:
    """Forwards without their backward after each action."""
    counts, held = [], 0
    for action in _work(plan):
        held += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.BACKWARD)
        counts.append(held)
    return counts
