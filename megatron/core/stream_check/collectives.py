"""Collectives as NCCL runs them. One with `async_op` runs on a stream of its group, behind the stream that calls:

    compute | fill x | all_reduce(x)      ...        wait | use x |
    group            | behind fill: reduces x |

The handle's `wait` orders the *stream* that calls it behind the collective, not the host: a result that is used on
another stream, or before the wait, is not ready, although gloo has long finished. Messages between two ranks have a
stream per peer. While a recorder runs, `wait` of torch's handle is replaced by one that tells it.

Without `async_op` a collective is one more kernel of the stream that calls, and NCCL gives no handle: what the same
stream does next is behind it, and what another stream does is not. gloo gives one, whose wait orders nothing more.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.core.stream_check.clocks import Operation, Snapshot
from megatron.core.stream_check.collective_order import Record, record_of
from megatron.core.stream_check.op_access import access_of, tensors_in
from megatron.core.stream_check.rules import Finding, Kind

if TYPE_CHECKING:
    from megatron.core.stream_check.recorder import StreamRecorder

OUTPUT_ONLY = frozenset({"recv_", "recv_any_source_"})
INPUT_ONLY = frozenset({"send"})
NO_DATA = frozenset({"barrier"})


@dataclass(frozen=True)
class GroupStream:
    """The stream of a process group, or of its messages with one peer."""

    role: str
    ranks: tuple[int, ...]
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.role} group" if self.peer is None else f"{self.role} messages with rank {self.peer}"


@dataclass
class _Open:
    """A collective whose handle nobody has waited for."""

    handle: Any
    tensors: list[torch.Tensor]
    """its tensors [...], which NCCL's handle keeps until it is waited for"""
    end: Snapshot
    operation: Operation
    step: int
    is_message: bool
    """point-to-point: NCCL batches these and gives one handle to all of a batch"""


class CollectiveStreams:
    """Runs the collectives of a recorder and keeps a record of each."""

    def __init__(self, recorder: "StreamRecorder") -> None:
        self.recorder = recorder
        self.records: list[Record] = []
        self._open: dict[int, _Open] = {}
        self._torch_wait: Any = None

    def attach(self) -> None:
        """Hear of every wait from now on."""
        original = self._torch_wait = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            self.recorder.is_paused = True  # what gloo does in here, NCCL does on the group's stream
            try:
                return original(work, *args, **kwargs)
            finally:
                self.recorder.is_paused = False
                self._on_wait(work)

        dist.Work.wait = wait  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give torch its method back."""
        dist.Work.wait = self._torch_wait  # type: ignore[method-assign]
        self._open.clear()

    def take_records(self) -> list[Record]:
        """The records since the last call, oldest first."""
        taken, self.records = self.records, []
        return taken

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a c10d operator as an operation of its group's stream."""
        record = record_of(func, args)
        self.records.append(record)
        recorder, clocks = self.recorder, self.recorder.clocks
        stream = recorder.current_stream()
        if _is_async(func, args):
            caller, stream = stream, GroupStream(record.role, record.ranks, record.peer)
            clocks.join(stream, clocks.snapshot(caller))
        operation = recorder.issue(access_of(func).name, stream)
        reads, writes = _split(func, args)
        recorder.read(reads, operation)
        recorder.write(writes, operation)
        result = func(*args, **kwargs)
        handle = _handle_in(result)
        is_message = record.peer is not None
        if handle is not None or is_message:  # NCCL gives a message of a batch none of its own
            self._open[id(handle or operation)] = _Open(
                handle, reads + writes, clocks.snapshot(stream), operation, recorder.step, is_message
            )
        return result

    def _on_wait(self, handle: Any) -> None:
        """The current stream is behind the collective; a handle we do not know stands for all open messages."""
        known = self._open.pop(id(handle), None)
        messages = [] if known else [key for key, work in self._open.items() if work.is_message]
        for work in [known] if known else [self._open.pop(key) for key in messages]:
            self.recorder.clocks.join(self.recorder.current_stream(), work.end)

    def judge_unwaited(self, step: int) -> None:
        """Report what was started in an earlier step and is still not waited for."""
        for work in self._open.values():
            if work.step < step:
                reason = "call wait() of its handle before its result is used and its buffers go"
                self.recorder.add(Finding(Kind.UNWAITED, "", work.operation, None, reason))


def _is_async(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a c10d operator was called with `async_op`, which is its default; messages are always so."""
    named = zip(func._schema.arguments, args, strict=False)
    return next((value for argument, value in named if argument.name == "async_op"), True)


def _split(func: Any, args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a c10d operator reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    op = func.overloadpacket.__name__
    if op in NO_DATA:
        return reads, writes
    for argument, value in zip(func._schema.arguments, args, strict=False):
        tensors = tensors_in(value)
        if "output" in argument.name or op in OUTPUT_ONLY:
            writes += tensors
        elif "input" in argument.name or op in INPUT_ONLY:
            reads += tensors
        else:
            reads += tensors
            writes += tensors
    return reads, writes


def _handle_in(result: Any) -> Any:
    """The handle among the results of a c10d operator; None if it has none."""
    for item in result if isinstance(result, tuple | list) else (result,):
        if isinstance(item, torch.ScriptObject) and str(item._type()).endswith("Work"):
            return dist.Work.unbox(item)
    return None
