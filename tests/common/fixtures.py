"""Fixtures around the worker pool; loaded as a plugin by tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.common.interpreted import Interpreter
    from tests.common.pool import WorkerPool

_POOLS: list[WorkerPool] = []


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """The workers of this test run; they start with the first job, and torch is imported for them only."""
    from tests.common.pool import WorkerPool

    workers = WorkerPool()
    _POOLS.append(workers)
    yield workers
    workers.shutdown()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    """Calls a function where Triton interprets its kernels, on CPU tensors."""
    pytest.importorskip("triton")
    from tests.common.interpreted import ENVIRONMENT, Interpreter
    from tests.common.pool import WorkerPool

    workers = WorkerPool(ENVIRONMENT)
    _POOLS.append(workers)
    yield Interpreter(workers)
    workers.shutdown()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line about the jobs: their number, total time and the slowest."""
    durations = [entry for workers in _POOLS for entry in workers.durations]
    if durations:
        total = sum(seconds for seconds, _ in durations)
        slowest, name = max(durations)
        terminalreporter.write_line(f"pool: {len(durations)} jobs in {total:.1f} s, slowest {slowest:.2f} s ({name})")
