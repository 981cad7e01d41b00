"""Watches every operator, allocation, free, collective and hand-over of a process, and applies the rules to them.

    with StreamRecorder() as recorder:
        step()
        recorder.finish_step()
    report(recorder.findings)

Operators come from a dispatch mode, so backward is seen as well. A storage is known by its address and its death by a
weak reference, so no memory lives longer for being watched. Hand-overs come from `core/streams`, whose observer this
is; on a device the stream is the one that is current there, on a CPU the virtual one. Kernels that torch does not
dispatch say what they touch by `streams.declare`.
"""

import functools
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core import streams
from megatron.core.errors import StreamOrderError
from megatron.core.stream_check import rules
from megatron.core.stream_check.allocator import Block, StreamOrderedAllocator
from megatron.core.stream_check.clocks import Clocks, Operation, Snapshot, Stream
from megatron.core.stream_check.collectives import CollectiveStreams
from megatron.core.stream_check.op_access import access_of, tensors_in
from megatron.core.stream_check.regions import note_read, note_write, touched
from megatron.core.stream_check.rules import Finding, Kind, StorageUses, name_of
from megatron.core.stream_check.sites import call_site, site_text
from megatron.core.streams import Event, Role


class StreamRecorder(TorchDispatchMode):
    """Records a process from entry to exit; `findings` holds what is wrong so far, each pair of lines once."""

    def __init__(self, first_step: int = 1) -> None:
        """What is allocated in step 0, during construction, may be kept unused."""
        super().__init__()
        self.findings: list[Finding] = []
        self.step = first_step
        self.num_operations = 0
        self.is_paused = False
        self._num_released = 0
        self.clocks = Clocks()
        self.collectives = CollectiveStreams(self)
        self._allocator = StreamOrderedAllocator()
        self._uses: dict[int, StorageUses] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._events: weakref.WeakKeyDictionary[Event, tuple[Snapshot, Operation]] = weakref.WeakKeyDictionary()
        self._put_off: weakref.WeakKeyDictionary[object, Operation] = weakref.WeakKeyDictionary()
        self._waits: dict[tuple[Stream, Stream], Operation] = {}
        self._keys: set[tuple[object, ...]] = set()

    def __enter__(self) -> "StreamRecorder":
        super().__enter__()
        streams.set_observer(self)
        self.collectives.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.collectives.detach()
        streams.set_observer(None)
        self._alive.clear()  # deaths after this are nobody's business
        super().__exit__(kind, error, trace)

    # What happens.

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        access = access_of(func)
        if self.is_paused:
            return func(*args, **kwargs)
        if access.is_view:
            if self._num_released:  # a view of nothing fails in torch, without a word about who emptied it
                self._refuse_released(tensors_in(args), access.name)
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self.collectives.run(func, args, kwargs)
        operation = self.issue(access.name)
        for i in access.reads:
            if i < len(args):
                self.read(args[i], operation)
        for i in access.writes:
            if i < len(args):
                self.write(args[i], operation)
        for keyword, value in kwargs.items():
            (self.write if keyword in access.written_keywords else self.read)(value, operation)
        output = func(*args, **kwargs)
        if not access.writes:
            for tensor in tensors_in(output):
                self._see_output(tensor, operation)
        return output

    def current_stream(self) -> Stream:
        """Where work goes now: a role, or a stream of the device that has none."""
        native = streams.native_stream(streams.current_role())
        if native is None:
            return streams.current_role()
        now = torch.cuda.current_stream()
        for role in Role:
            if now == streams.native_stream(role):
                return role
        return f"stream {now.stream_id}"

    def stream_names(self) -> list[str]:
        """Every stream that was used."""
        return [name_of(stream) for stream in self.clocks.streams]

    def issue(self, name: str, stream: Stream | None = None) -> Operation:
        """Count an operation on `stream`, or on the current one."""
        self.num_operations += 1
        stream = self.current_stream() if stream is None else stream
        return Operation(stream, self.clocks.advance(stream), name, streams.current_label(), call_site())

    def _mark(self, stream: Stream, name: str) -> Operation:
        """Something that happens between two operations of `stream`."""
        return Operation(stream, self.clocks.of(stream)[stream], name, streams.current_label(), call_site())

    def read(self, value: Any, operation: Operation) -> None:
        """`operation` reads the tensors in `value`."""
        for tensor in tensors_in(value):
            uses = self._of(tensor, operation)
            if uses is not None:
                part = touched(uses.regions, tensor)
                first = rules.unordered_before_read(uses.regions[part], operation.stream, self.clocks)
                if first is not None:
                    self._report_pair(Kind.READ, uses, first, operation)
                note_read(uses.regions, part, operation)
                rules.note_use(uses, operation)

    def write(self, value: Any, operation: Operation) -> None:
        """`operation` writes the tensors in `value`."""
        for tensor in tensors_in(value):
            uses = self._of(tensor, operation)
            if uses is not None:
                part = touched(uses.regions, tensor)
                first = rules.unordered_before_write(uses.regions[part], operation.stream, self.clocks)
                if first is not None:
                    self._report_pair(Kind.WRITE, uses, first, operation)
                note_write(uses.regions, part, operation)
                rules.note_use(uses, operation)

    def name(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Call tensors [...] that outlive a step by these names in reports."""
        for name, tensor in tensors.items():
            uses = self._uses.get(tensor.untyped_storage()._cdata) or self._register(tensor)
            uses.name = uses.name or name
            if uses.owner not in (None, Role.COMPUTE):
                self._report(Kind.OWNER, uses, uses.allocation, None, "allocate what outlives a stage on compute")

    # Storages.

    def _of(self, tensor: torch.Tensor, operation: Operation) -> StorageUses | None:
        """The uses of the storage behind a tensor; None if there is no memory to speak of."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        uses = self._uses.get(tensor.untyped_storage()._cdata)
        if uses is None:
            uses = self._register(tensor)
        elif uses.release is not None:
            self._refuse_released([tensor], operation.name, operation)
        uses.step_used = self.step
        return uses

    def _refuse_released(self, tensors: Iterable[torch.Tensor], name: str, operation: Operation | None = None) -> None:
        """Stop in front of a use of memory that was given back: it would end the process."""
        for tensor in tensors:
            uses = self._uses.get(tensor.untyped_storage()._cdata)
            if uses is not None and uses.release is not None and not tensor.untyped_storage().nbytes():
                then = operation or self._mark(self.current_stream(), name)
                self._report(Kind.RELEASED, uses, uses.release, then, "release it after this use")
                raise StreamOrderError(f"{uses} is used by {name} at {site_text(then.site)} after its release")

    def _see_output(self, tensor: torch.Tensor, operation: Operation) -> None:
        """A result that is no view: its storage is new."""
        if tensor.layout is not torch.strided or tensor.untyped_storage()._cdata in self._uses:
            return
        uses = self._register(tensor)
        if not uses.num_bytes:
            return
        uses.owner, uses.allocation, uses.regions[0].last_write = operation.stream, operation, operation
        uses.step_allocated = uses.step_used = self.step
        uses.block = self._allocator.allocate(operation.stream, uses.num_bytes)
        self._judge_reuse(uses.block, operation)

    def _register(self, tensor: torch.Tensor) -> StorageUses:
        storage = tensor.untyped_storage()
        key = storage._cdata
        uses = self._uses[key] = StorageUses(tensor.dtype, tuple(tensor.shape), storage.nbytes())
        self._alive[key] = weakref.ref(storage, functools.partial(self._on_death, key))
        return uses

    def _on_death(self, key: int, reference: Any) -> None:
        """The last reference to a storage went."""
        del self._alive[key]
        uses = self._uses.pop(key)
        if uses.release is None:
            self._free(uses, "free")
        else:
            self._num_released -= 1

    def _free(self, uses: StorageUses, how: str) -> Operation:
        """Give the block of a storage back to its owner; what is unfinished is judged when it is reused."""
        stream = self.current_stream() if uses.owner is None else uses.owner
        operation = self._mark(stream, how)
        if uses.block is not None:
            unfinished = rules.unordered_before_free(uses, self.clocks)
            uses.block.unfinished = [(uses, first, operation) for first in unfinished]
            self._allocator.free(uses.block)
            uses.block = None
        return operation

    def _judge_reuse(self, block: Block, allocation: Operation | None) -> None:
        """Report the uses that a block was freed before; `allocation` has it now, None if nobody."""
        for uses, first, freed in block.unfinished:
            if allocation is not None and not self.clocks.is_ordered(first, allocation.stream):
                self._report_pair(Kind.REUSE, uses, first, allocation)
            else:
                self._report_pair(Kind.FREE, uses, first, freed)
        block.unfinished = []

    # Hand-overs: what `core/streams` tells its observer.

    def on_switch(self, role: Role, label: str) -> None:
        """The stream and label are asked for when they matter."""

    def on_record(self, event: Event) -> None:
        """An event is worth the clock of its stream at this moment."""
        mark = self._mark(event.role, "event")
        before = self._events.get(event)
        if before is not None and before[1].stream != event.role:
            self._report(Kind.EVENT, None, before[1], mark, "record an event of its own on each stream")
        self._events[event] = self.clocks.snapshot(event.role), mark

    def on_wait(self, role: Role, event: Event) -> None:
        """The stream is behind all that the event is behind."""
        known = self._events.get(event)
        if known is not None:
            self.clocks.join(role, known[0])
            self._waits[role, known[1].stream] = known[1]

    def on_hold(self, tensor: torch.Tensor, owner: Role, user: Role) -> None:
        """A stage that is done with a tensor [...] must have used it, else it was kept for nothing."""
        uses = self._uses.get(tensor.untyped_storage()._cdata)
        if uses is None or uses.allocation is None:
            return
        if rules.is_kept_in_vain(uses, streams.current_label()):
            reason = "do not keep it for backward: nothing saved it"
            last = uses.others.get(user) or uses.allocation
            self._report(Kind.LEAK, uses, last, self._mark(user, "hold"), reason)

    def on_retire(self, tensor: torch.Tensor, owner: Role, user: Role) -> None:
        """What a hold kept is judged when it dies."""

    def on_release(self, tensor: torch.Tensor) -> None:
        """The storage of tensor [...] is freed now, whoever refers to it."""
        uses = self._uses.get(tensor.untyped_storage()._cdata)
        if uses is not None and uses.release is None:
            uses.release = self._free(uses, "release")
            self._num_released += 1

    def on_put_off(self, work: object) -> None:
        """Note where work was put off."""
        self._put_off[work] = self._mark(streams.current_role(), "put off")

    def on_take_up(self, work: object) -> None:
        """Work that was put off belongs to the stream that put it off."""
        before, now = self._put_off.pop(work, None), self._mark(streams.current_role(), "taken up")
        if before is not None and before.stream != now.stream:
            self._report(Kind.WGRAD, None, before, now, f"run it on {name_of(before.stream)}")

    def on_access(self, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """A kernel that torch does not dispatch: `reads` and `writes` are the tensors [...] it touches."""
        operation = self.issue(name)
        self.read(list(reads), operation)
        self.write(list(writes), operation)

    # The end of a step.

    def finish_step(self) -> None:
        """Judge what can only be judged now, and begin the next step."""
        for block in self._allocator.free_blocks():
            self._judge_reuse(block, None)
        for uses in list(self._uses.values()):
            if uses.release is None and uses.num_bytes and rules.is_leak(uses, self.step):
                self._report(Kind.LEAK, uses, uses.allocation, None, "drop the reference after its last use")
                uses.step_allocated = 0
        self.collectives.judge_unwaited(self.step)
        for stream in self.clocks.streams:
            if isinstance(stream, Role) and not self.clocks.is_behind(Role.COMPUTE, stream):
                name = name_of(stream)
                self.add(Finding(Kind.UNJOINED, name, remedy=f"let compute wait for {name} at the end of the step"))
        self.step += 1

    # Findings.

    def _report_pair(self, kind: Kind, uses: StorageUses, first: Operation, then: Operation) -> None:
        """Two operations without order: say what the later one waited for instead."""
        waited = self._waits.get((then.stream, first.stream))
        ours, theirs = name_of(then.stream), name_of(first.stream)
        if waited is None:
            reason = f"{ours} has not waited for {theirs}"
        else:
            reason = (
                f"the last event of {theirs} that {ours} waited for was recorded before it, at {site_text(waited.site)}"
            )
        self._report(kind, uses, first, then, reason)

    def _report(
        self, kind: Kind, uses: StorageUses | None, first: Operation | None, then: Operation | None, reason: str
    ) -> None:
        self.add(Finding(kind, "" if uses is None else str(uses), first, then, reason))

    def add(self, finding: Finding) -> None:
        """Keep a finding unless its two lines are known already."""
        if finding.key() not in self._keys:
            self._keys.add(finding.key())
            self.findings.append(finding)
