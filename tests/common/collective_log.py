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


class _Watch(TorchDispatchMode):
    """Shows the c10d ops to all open logs: one mode, however many are open, for every op pays for every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[CollectiveLog] = []
        self._is_collective: dict[Any, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard costs more than the look

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        is_collective = self._is_collective.get(func)
        if is_collective is None:
            is_collective = self._is_collective[func] = func.namespace == "c10d"
        if is_collective:
            record = record_of(func, args)
            for log in self.logs:
                log.note(record)
        return func(*args, **kwargs) if kwargs else func(*args)


_watch = _Watch()


class CollectiveLog:
    """Record the c10d ops issued inside the block; `sink` gets each as a line before it runs. Blocks may be nested."""

    def __init__(self, keep_last: int | None = None, sink: Any = None) -> None:
        self._records: deque[Record] = deque(maxlen=keep_last)
        self._sink = sink

    def __enter__(self) -> "CollectiveLog":
        if not _watch.logs:
            _watch.__enter__()
        _watch.logs.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _watch.logs.remove(self)
        if not _watch.logs:
            _watch.__exit__(*error)

    def note(self, record: Record) -> None:
        """Add one record."""
        self._records.append(record)
        if self._sink is not None:
            self._sink.write(f"{record}\n")
            self._sink.flush()

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
