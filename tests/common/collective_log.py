"""A record of every collective of a rank, and the comparison of all ranks' records.

`CollectiveLog` keeps each op of torch's `c10d` namespace, in forward and backward: op, group, dtype, sizes and the two
frames of ours that called it. `compare_logs` tells from the records of all ranks whether the step could have hung:

    with CollectiveLog() as log:
        step()
    findings = compare_logs(all_ranks_records)      # [] or sentences
"""

import os
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# An environment inside the checkout holds torch's files, not ours.
_PACKAGES = os.sep + "site-packages" + os.sep
_OWN_FILES = tuple(os.path.join(_ROOT, "tests", "common", name) for name in ("collective_log.py", "pool_worker.py"))
_SENDS = ("send",)
_RECEIVES = ("recv_", "recv_any_source_")
_ALL_TO_ALL = "alltoall_base_"


@dataclass(frozen=True)
class Record:
    """One communication call of one rank."""

    op: str
    """Name in the c10d namespace: allreduce_, alltoall_base_, send, ..."""
    role: str
    """The group's description: tp, ep, dp, ... or default."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    dtype: str
    """Dtype of the first tensor."""
    numels: tuple[int, ...]
    """Number of elements of each tensor, outputs first."""
    where: tuple[str, ...]
    """Up to two of our frames, innermost first, as file:line function."""
    send_numels: tuple[int, ...] = ()
    """all-to-all: elements for each rank of the group."""
    receive_numels: tuple[int, ...] = ()
    """all-to-all: elements from each rank of the group."""
    peer: int | None = None
    """Point-to-point: global rank of the other side."""

    @property
    def group(self) -> str:
        """The group as text."""
        return f"{self.role}{list(self.ranks)}"

    def signature(self) -> tuple[Any, ...]:
        """What must be equal on all members of the group; the sizes of an all-to-all differ by right."""
        return self.op, self.dtype, () if self.op == _ALL_TO_ALL else self.numels

    def __str__(self) -> str:
        sizes = f"{list(self.numels)}"
        if self.op == _ALL_TO_ALL:
            sizes = f"send {list(self.send_numels)} receive {list(self.receive_numels)}"
        peer = "" if self.peer is None else f" peer {self.peer}"
        return f"{self.op} {self.group}{peer} {self.dtype} {sizes} at {' < '.join(self.where)}"


class CollectiveLog(TorchDispatchMode):
    """Record the c10d ops issued inside the block; `sink` gets each as a line before it runs."""

    def __init__(self, keep_last: int | None = None, sink: Any = None) -> None:
        super().__init__()
        self._records: deque[Record] = deque(maxlen=keep_last)
        self._sink = sink

    @property
    def records(self) -> list[Record]:
        """The records so far, oldest first."""
        return list(self._records)

    def count(self, op: str, role: str | None = None) -> int:
        """Number of records of `op`, optionally of one role of group only."""
        return sum(r.op == op and role in (None, r.role) for r in self._records)

    def counts(self) -> Counter[tuple[str, str]]:
        """Number of records by (op, role)."""
        return Counter((r.op, r.role) for r in self._records)

    def text(self) -> str:
        """The records, one per line."""
        return "\n".join(str(r) for r in self._records) or "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            record = _record(func, args)
            self._records.append(record)
            if self._sink is not None:
                self._sink.write(f"{record}\n")
                self._sink.flush()
        return func(*args, **(kwargs or {}))


def _record(func: Any, args: tuple[Any, ...]) -> Record:
    op = func.overloadpacket.__name__
    group = next(g for g in map(_unbox, args) if g is not None)
    tensors = [t for arg in args for t in _flatten(arg)]
    ranks = tuple(dist.get_process_group_ranks(group))
    extra: dict[str, Any] = {}
    if op == _ALL_TO_ALL:
        output, sent, _, output_splits, input_splits = args[:5]
        extra["send_numels"] = _split_numels(sent, input_splits, len(ranks))
        extra["receive_numels"] = _split_numels(output, output_splits, len(ranks))
    if op in _SENDS + _RECEIVES[:1]:
        extra["peer"] = ranks[args[2]]
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "none"
    numels = tuple(t.numel() for t in tensors)
    return Record(op, _role(group), ranks, dtype, numels, _our_frames(), **extra)


def _unbox(arg: Any) -> dist.ProcessGroup | None:
    """The process group inside a boxed argument; None for anything else."""
    if not isinstance(arg, torch.ScriptObject) or "ProcessGroup" not in str(arg._type()):
        return None
    return dist.ProcessGroup.unbox(arg)


def _role(group: dist.ProcessGroup) -> str:
    """The description given at creation; "default" for the default group, which has torch's own text."""
    return "default" if group is dist.group.WORLD else group.group_desc


def _flatten(arg: Any) -> list[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, list | tuple):
        return [t for item in arg for t in _flatten(item)]
    return []


def _split_numels(tensor: torch.Tensor, splits: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Elements per rank; empty `splits` cut dim 0 evenly."""
    if not splits:
        return (tensor.numel() // world_size,) * world_size
    row = tensor[0].numel() if tensor.shape[0] else 0
    return tuple(split * row for split in splits)


def _our_frames() -> tuple[str, ...]:
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 2:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT) and _PACKAGES not in path and path not in _OWN_FILES:
            found.append(f"{os.path.relpath(path, _ROOT)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)


def compare_logs(logs: Sequence[Sequence[Record]]) -> list[str]:
    """Compare the records of ranks 0, 1, ...; return one sentence per kind of disagreement, first difference only."""
    findings = _compare_within_groups(logs)
    if not findings:
        findings = _compare_all_to_all(logs)
    findings += _compare_point_to_point(logs)
    if not findings:
        findings = _compare_group_order(logs)
    return findings


def _collectives(log: Sequence[Record]) -> list[Record]:
    return [r for r in log if r.op not in _SENDS + _RECEIVES]


def _first_difference(what: str, a: int, b: int, left: list[Record], right: list[Record], key: Any) -> list[str]:
    """One sentence with both ranks' records where the two sequences part."""
    for i in range(max(len(left), len(right))):
        mine, theirs = (seq[i] if i < len(seq) else None for seq in (left, right))
        if mine is None or theirs is None or key(mine) != key(theirs):
            return [f"{what}, call {i}: rank {a} has {mine or 'nothing'}; rank {b} has {theirs or 'nothing'}"]
    return []


def _compare_within_groups(logs: Sequence[Sequence[Record]]) -> list[str]:
    """All members of a group issue the same sequence of (op, dtype, size)."""
    findings = []
    for group in sorted({(r.role, r.ranks) for log in logs for r in _collectives(log)}):
        members = [rank for rank in group[1] if rank < len(logs)]
        sequences = [[r for r in _collectives(logs[rank]) if (r.role, r.ranks) == group] for rank in members]
        for rank, sequence in zip(members[1:], sequences[1:], strict=True):
            what = f"group {group[0]}{list(group[1])}"
            difference = _first_difference(what, members[0], rank, sequences[0], sequence, Record.signature)
            if difference:
                findings += difference
                break
    return findings


def _compare_all_to_all(logs: Sequence[Sequence[Record]]) -> list[str]:
    """What rank i sends to j is what j expects from i."""
    for group in sorted({(r.role, r.ranks) for log in logs for r in log if r.op == _ALL_TO_ALL}):
        members = group[1]
        calls = [[r for r in logs[m] if r.op == _ALL_TO_ALL and (r.role, r.ranks) == group] for m in members]
        for n, same_call in enumerate(zip(*calls, strict=True)):
            for i, source in enumerate(same_call):
                for j, target in enumerate(same_call):
                    if source.send_numels[j] != target.receive_numels[i]:
                        return [
                            f"all-to-all {n} of {source.group}: rank {members[i]} sends {source.send_numels[j]} "
                            f"elements to rank {members[j]}, which expects {target.receive_numels[i]}: "
                            f"{source}; {target}"
                        ]
    return []


def _compare_point_to_point(logs: Sequence[Sequence[Record]]) -> list[str]:
    """Every send has its receive, in the same order and of the same size."""
    findings: list[str] = []
    for source, log in enumerate(logs):
        for target, other in enumerate(logs):
            sends = [r for r in log if r.op in _SENDS and r.peer == target]
            receives = [r for r in other if r.op == _RECEIVES[0] and r.peer == source]
            what = f"messages from rank {source} to rank {target}"
            findings += _first_difference(what, source, target, sends, receives, lambda r: (r.dtype, r.numels))
    return findings


def _compare_group_order(logs: Sequence[Sequence[Record]]) -> list[str]:
    """Groups that two ranks share appear in the same order on both, else each may wait for the other."""
    for a in range(len(logs)):
        for b in range(a + 1, len(logs)):
            left, right = ([r for r in _collectives(log) if {a, b} <= set(r.ranks)] for log in (logs[a], logs[b]))
            what = f"order of the groups shared by ranks {a} and {b}"
            difference = _first_difference(what, a, b, left, right, lambda r: (r.role, r.ranks))
            if difference:
                return difference
    return []
