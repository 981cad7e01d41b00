"""A record of every collective of a rank, and the comparison of all ranks' records.

`CollectiveLog` keeps each op of torch's `c10d` namespace, in forward and backward: op, group, dtype, sizes and the two
frames of ours that called it. `compare_logs` tells from the records of all ranks whether the step could have hung:

    with CollectiveLog() as log:
        step()
    findings = compare_logs(all_ranks_records)      # [] or sentences
"""

from collections import Counter, deque
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.stream_check.collective_order import Record, record_of
from megatron.core.stream_check.collective_order import compare_records as compare_logs

__all__ = ["CollectiveLog", "Record", "compare_logs"]


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
            record = record_of(func, args)
            self._records.append(record)
            if self._sink is not None:
                self._sink.write(f"{record}\n")
                self._sink.flush()
        return func(*args, **(kwargs or {}))
