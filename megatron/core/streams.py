"""Two streams, how work is handed over between them, and when memory may go.

    compute | produce x | record e |        ...         | wait f | use y | record g |
    comm                | wait e   | send x, receive y  | record f       | wait g   : y may go

A step runs in `with step(device)`. In it `on(role)` chooses the stream, `record()` marks what the current stream was
given so far, `wait(event)` makes the current stream wait for such a mark. Nothing else orders the two streams.

Memory belongs to the stream that was current when it was allocated, its *owner*; the allocator reuses a block in the
order of that stream only. A tensor that the other stream uses must therefore outlive that use:

    hold(x, owner)      the current stream was given its last use of x; x stays until `owner` has waited for that
    release(x, owner)   the same, and then the storage of x is emptied, whoever still refers to it

Both end in a *retirement*: by clock, as soon as the owner has waited for an event recorded on the user's stream at or
after the last use. `record_stream` is not used: a block that is so marked during a graph capture cannot be reused until
the capture ends.

Roles are resolved when they are used. Compute is the stream that was current when the step began (under a capture: the
capturing one), comm one side stream of the process. On a CPU the streams are virtual: work runs at once, the order is
tracked all the same, so that a checker can prove it. Outside of a step there is one stream and nothing to order.

`set_observer` shows every switch, record, wait, hold, retirement and release to one observer. The functions are called
through the module (`streams.wait(event)`), which is also how tests replace one of them.
"""

import contextlib
import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Role(enum.Enum):
    """What a stream is for."""

    COMPUTE = "compute"
    COMM = "comm"

    @property
    def other(self) -> "Role":
        """The stream on the other side of a hand-over."""
        return Role.COMM if self is Role.COMPUTE else Role.COMPUTE


Clock = dict[Role, int]
"""For each stream the number of its last record that is known to be ordered before."""


@dataclass(frozen=True, eq=False)
class Event:
    """A mark behind everything that `role` had been given when it was recorded."""

    role: Role
    clock: Clock
    native: torch.cuda.Event | None = None
    """The device's event; None for virtual streams."""


class StreamObserver(Protocol):
    """Sees what happens to streams and lifetimes, each call at the moment of the act and on the host's stack of it."""

    def on_switch(self, role: Role, label: str) -> None:
        """Work goes to `role` from here on; `label` says what for."""
        ...

    def on_record(self, event: Event) -> None:
        """`event.role` recorded `event`."""
        ...

    def on_wait(self, role: Role, event: Event) -> None:
        """`role` waits for `event` before its next work."""
        ...

    def on_hold(self, tensor: torch.Tensor, owner: Role, user: Role) -> None:
        """`tensor` [...] of `owner` stays until `owner` has waited for what `user` was given so far."""
        ...

    def on_retire(self, tensor: torch.Tensor, owner: Role, user: Role) -> None:
        """The condition of a hold came true."""
        ...

    def on_release(self, tensor: torch.Tensor) -> None:
        """The storage of `tensor` [...] is about to be emptied."""
        ...

    def on_put_off(self, work: object) -> None:
        """The current stream puts `work` off."""
        ...

    def on_take_up(self, work: object) -> None:
        """The current stream does what was put off."""
        ...

    def on_access(self, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """A kernel that torch does not dispatch reads and writes these tensors [...] on the current stream."""
        ...


@dataclass
class _Held:
    """A tensor that waits for its owner's stream."""

    tensor: torch.Tensor
    owner: Role
    user: Role
    tick: int
    """The record of `user` that its owner has to wait for."""
    is_released: bool
    """Empty the storage on retirement."""


@dataclass
class _Streams:
    """The streams of this process; one step at a time."""

    comm: torch.cuda.Stream | None = None
    """The side stream, made once and kept: streams come from a small pool and would alias."""
    comm_kind: tuple[int, int] | None = None
    """Device and priority of the side stream."""
    compute: torch.cuda.Stream | None = None
    is_active: bool = False
    role: Role = Role.COMPUTE
    label: str = ""
    clocks: dict[Role, Clock] = field(default_factory=lambda: {role: dict.fromkeys(Role, 0) for role in Role})
    """What each stream is ordered behind."""
    held: list[_Held] = field(default_factory=list)
    observer: StreamObserver | None = None

    def begin(self, device: torch.device, high_priority_comm: bool) -> None:
        """Resolve both roles."""
        assert not self.is_active, "a step inside a step; the streams belong to one at a time"
        self.is_active, self.role, self.label = True, Role.COMPUTE, ""
        self.compute = None
        if device.type != "cuda":
            return
        self.compute = torch.cuda.current_stream(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        kind = index, -1 if high_priority_comm else 0
        if kind != self.comm_kind:
            self.comm, self.comm_kind = None, kind
        while self.comm is None or self.comm.cuda_stream == self.compute.cuda_stream:
            self.comm = torch.cuda.Stream(device, priority=kind[1])

    def native(self, role: Role) -> torch.cuda.Stream | None:
        """The device's stream of a role; None if streams are virtual."""
        if self.compute is None:
            return None
        return self.compute if role is Role.COMPUTE else self.comm

    def retire(self, is_end: bool = False) -> None:
        """Let go of everything whose owner has waited for its user; at the end of a step that is all."""
        kept = []
        for held in self.held:
            if self.clocks[held.owner][held.user] < held.tick:
                kept.append(held)
                continue
            if self.observer is not None:
                self.observer.on_retire(held.tensor, held.owner, held.user)
            if held.is_released:
                empty_storage(held.tensor)
        self.held = kept
        assert not (is_end and kept), f"{len(kept)} tensors are held after both streams were joined"


_STATE = _Streams()


def reset() -> None:
    """Forget streams, clocks, held tensors and the observer."""
    global _STATE
    _STATE = _Streams()


def set_observer(observer: StreamObserver | None) -> None:
    """Show everything from here on to `observer`; None shows it to nobody."""
    _STATE.observer = observer


def is_active() -> bool:
    """True inside a step that has two streams."""
    return _STATE.is_active


def current_role() -> Role:
    """The stream that work goes to; compute outside of a step."""
    return _STATE.role


def current_label() -> str:
    """What the current stream is at work for."""
    return _STATE.label


def native_stream(role: Role) -> torch.cuda.Stream | None:
    """The device's stream of a role inside a step; None outside and if streams are virtual."""
    return _STATE.native(role)


def declare(name: str, reads: Iterable[torch.Tensor | None] = (), writes: Iterable[torch.Tensor | None] = ()) -> None:
    """Say which tensors [...] the kernel `name` touches, which torch does not dispatch; call it before the launch.

    A Triton kernel or a library call is invisible to an observer otherwise. What it adds to is read and written. None
    stands for an operand that a launch does without.
    """
    if _STATE.observer is not None:
        present = ([tensor for tensor in tensors if tensor is not None] for tensors in (reads, writes))
        _STATE.observer.on_access(name, *present)


def put_off(work: object) -> None:
    """Tell the observer that the current stream leaves `work` for later."""
    if _STATE.observer is not None:
        _STATE.observer.on_put_off(work)


def take_up(work: object) -> None:
    """Tell it that the current stream does it now; it ought to be the same stream."""
    if _STATE.observer is not None:
        _STATE.observer.on_take_up(work)


def native(role: Role) -> torch.cuda.Stream | None:
    """The device's stream of a role; None outside of a step and where streams are virtual."""
    return _STATE.native(role)


def num_held() -> int:
    """Tensors that wait for their owner's stream."""
    return len(_STATE.held)


@contextlib.contextmanager
def step(device: torch.device, high_priority_comm: bool = False) -> Iterator[None]:
    """Run a step on two streams; afterwards both are joined and nothing is held.

    Graph: capturable; the side stream forks from and joins the capturing one.
    """
    _STATE.begin(device, high_priority_comm)
    try:
        yield
        join()
        _STATE.retire(is_end=True)
    finally:
        _STATE.held.clear()
        _STATE.is_active, _STATE.compute = False, None


def join() -> None:
    """Order each stream behind the other; compute comes last, so that a capture ends on its own stream."""
    for role in (Role.COMM, Role.COMPUTE):
        with on(role.other, "join"):
            event = record()
        with on(role, "join"):
            wait(event)


@contextlib.contextmanager
def on(role: Role, label: str = "") -> Iterator[None]:
    """Give the work of this block to the stream of `role`; `label` names it in reports.

    Outside of a step everything stays on the one stream that there is.
    """
    state = _STATE
    if not state.is_active:
        yield
        return
    before = state.role, state.label
    _switch(state, role, label or state.label)
    try:
        with torch.cuda.stream(state.native(role)):  # a stream of None changes nothing
            yield
    finally:
        _switch(state, *before)


def _switch(state: _Streams, role: Role, label: str) -> None:
    state.role, state.label = role, label
    if state.observer is not None:
        state.observer.on_switch(role, label)


def record() -> Event:
    """Mark what the current stream was given so far."""
    state = _STATE
    clock = state.clocks[state.role]
    clock[state.role] += 1
    stream, native = state.native(state.role), None
    if stream is not None:
        native = torch.cuda.Event()
        native.record(stream)
    event = Event(state.role, dict(clock), native)
    if state.observer is not None:
        state.observer.on_record(event)
    return event


def wait(event: Event) -> None:
    """Make the current stream wait for `event`, and retire what was held until then."""
    state = _STATE
    stream = state.native(state.role)
    if stream is not None and event.native is not None and event.role is not state.role:
        stream.wait_event(event.native)
    clock = state.clocks[state.role]
    for role, tick in event.clock.items():
        clock[role] = max(clock[role], tick)
    if state.observer is not None:
        state.observer.on_wait(state.role, event)
    state.retire()


def hold(tensor: torch.Tensor, owner: Role) -> None:
    """Keep `tensor` [...] until `owner`, whose memory it is, has waited for what the current stream was given so far.

    Nothing has to be kept if the current stream is the owner: it reuses the block in its own order.
    """
    _keep(tensor, owner, is_released=False)


def release(tensor: torch.Tensor, owner: Role) -> None:
    """Empty the storage of `tensor` [...] once `owner` has waited for what the current stream was given so far.

    Memory: freed although tensors still refer to it; a later use of one of them fails.
    """
    _keep(tensor, owner, is_released=True)


def _keep(tensor: torch.Tensor, owner: Role, is_released: bool) -> None:
    state = _STATE
    if not state.is_active or owner is state.role:
        if is_released:
            empty_storage(tensor)
        return
    if state.observer is not None:
        state.observer.on_hold(tensor, owner, state.role)
    tick = state.clocks[state.role][state.role] + 1
    state.held.append(_Held(tensor, owner, state.role, tick, is_released))


def empty_storage(tensor: torch.Tensor) -> None:
    """Give back the memory behind `tensor` [...] now: the only place that resizes a storage."""
    if _STATE.observer is not None:
        _STATE.observer.on_release(tensor)
    tensor.untyped_storage().resize_(0)
