"""What each rank communicates, and whether the ranks agree: a disagreement is a future hang or wrong data.

`compare_records` takes the records of ranks 0, 1, ... and returns a sentence for each kind of disagreement, with both
ranks' records and call places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.stream_check.op_access import tensors_in
from megatron.core.stream_check.sites import call_site, site_text

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


def record_of(func: Any, args: tuple[Any, ...]) -> Record:
    """The record of a c10d operator that is about to be called with `args`."""
    op = func.overloadpacket.__name__
    group = next(g for g in map(_unbox, args) if g is not None)
    tensors = tensors_in(args)
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
    return Record(op, _role(group), ranks, dtype, numels, tuple(site_text((frame,)) for frame in call_site()), **extra)


def _unbox(arg: Any) -> dist.ProcessGroup | None:
    """The process group inside a boxed argument; None for anything else."""
    if not isinstance(arg, torch.ScriptObject) or "ProcessGroup" not in str(arg._type()):
        return None
    return dist.ProcessGroup.unbox(arg)


def _role(group: dist.ProcessGroup) -> str:
    """The description given at creation; "default" for the default group, which has torch's own text."""
    return "default" if group is dist.group.WORLD else group.group_desc


def _split_numels(tensor: torch.Tensor, splits: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Elements per rank; empty `splits` cut dim 0 evenly."""
    if not splits:
        return (tensor.numel() // world_size,) * world_size
    row = tensor[0].numel() if tensor.shape[0] else 0
    return tuple(split * row for split in splits)


def compare_records(logs: Sequence[Sequence[Record]]) -> list[str]:
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
