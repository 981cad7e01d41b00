"""A pool of worker processes that run jobs as the ranks of a small gloo world.

Starting a rank costs seconds, a job on a waiting rank milliseconds, so the workers live as long as the test run:

    results = pool.run(job, 2, "argument", world_size=2)     # [result of rank 0, result of rank 1]

`job` is a module-level function; it runs with torch.distributed initialised over exactly `world_size` ranks. Arguments
and results are pickled. After each job a worker destroys its process groups and resets every process-wide object.
A job that misses its deadline is a failed test: the parent prints where each rank is and its last collectives, ends
the workers it started and starts others for the next job.
"""

import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.common.pool_worker import GroupSetupError, Job, Outcome, worker_main

MAX_WORLD_SIZE = 4
RESTART_AFTER = ("Died", GroupSetupError.__name__)
START_DEADLINE_S = 120.0
DEFAULT_DEADLINE_S = 30.0
# How long the other ranks may take to fail by themselves once one rank has reported an error.
ERROR_GRACE_S = 5.0


class RankErrors(AssertionError):
    """At least one rank failed; `errors` maps each failed rank to (exception type name, traceback)."""

    def __init__(self, job: str, errors: dict[int, tuple[str, str]]) -> None:
        self.errors = errors
        texts = [f"--- rank {rank} ---\n{text}" for rank, (_, text) in sorted(errors.items())]
        super().__init__(f"{job}: {len(errors)} rank(s) failed\n" + "\n".join(texts))


@dataclass
class _Worker:
    """One process and the parent's end of its pipe."""

    process: Any
    pipe: Connection
    report_path: Path


class WorkerPool:
    """Up to `MAX_WORLD_SIZE` ranks, started when a job first needs them, with `environment` added to this process's."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self.durations: list[tuple[float, str]] = []
        self._workers: list[_Worker] = []
        self._job_count = 0
        self._folder = Path(tempfile.mkdtemp(prefix="pool_"))
        # The parent serves the store: it outlives every worker, and no job has to find a free port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        deadline_s: float = DEFAULT_DEADLINE_S,
        group_timeout_s: float | None = None,
    ) -> list[Any]:
        """Call `function(*args)` on ranks 0 .. world_size - 1 and return their results in rank order.

        Raises: RankErrors with every rank's traceback if a rank raised, died or missed the deadline.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_WORLD_SIZE} ranks.")
        self._start_workers(world_size)
        self._job_count += 1
        name = f"{function.__module__}.{function.__qualname__}"
        payload = pickle.dumps(
            Job(
                module=function.__module__,
                file=inspect.getfile(function),
                qualname=function.__qualname__,
                args=args,
                world_size=world_size,
                store_prefix=f"job{self._job_count}",
                group_timeout=timedelta(seconds=group_timeout_s or max(deadline_s - 10.0, 1.0)),
            )
        )
        begin = time.monotonic()
        for worker in self._workers[:world_size]:
            worker.pipe.send_bytes(payload)
        outcomes = self._collect(world_size, deadline_s)
        self.durations.append((time.monotonic() - begin, name))
        errors = {rank: (o.error_type, o.traceback) for rank, o in outcomes.items() if o.error_type is not None}
        if errors:
            raise RankErrors(name, errors)
        return [outcomes[rank].result for rank in range(world_size)]

    def close(self) -> None:
        """End all workers; the pool can be used again afterwards."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(2.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []

    def shutdown(self) -> None:
        """End all workers and remove the pool's folder."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_workers(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        first_new = len(self._workers)
        for rank in range(first_new, count):
            parent_end, child_end = context.Pipe()
            report_path = self._folder / f"rank{rank}_job{self._job_count}.txt"
            process = context.Process(
                target=worker_main, args=(rank, child_end, str(report_path), self._store.port), daemon=True
            )
            with _added_to_environment(self._environment):
                process.start()
            child_end.close()
            self._workers.append(_Worker(process, parent_end, report_path))
        for worker in self._workers[first_new:]:
            if not worker.pipe.poll(START_DEADLINE_S):
                raise RuntimeError(f"a worker did not start within {START_DEADLINE_S} s.")
            worker.pipe.recv_bytes()

    def _collect(self, world_size: int, deadline_s: float) -> dict[int, Outcome]:
        """Wait for all ranks, at most until the deadline, which an error of one rank brings forward."""
        waiting = {self._workers[rank].pipe: rank for rank in range(world_size)}
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + deadline_s
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                assert isinstance(pipe, Connection), f"waited on {pipe}"
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._workers[rank].process.join(1.0)
                    code = self._workers[rank].process.exitcode
                    outcomes[rank] = Outcome.failed("Died", f"the process ended with exit code {code}")
                if outcomes[rank].error_type is not None:
                    end = min(end, time.monotonic() + ERROR_GRACE_S)
        for rank in waiting.values():
            late = f"no result within the deadline of {deadline_s} s\n{self._report(rank)}"
            outcomes[rank] = Outcome.failed("DeadlineExceeded", late)
        if waiting or any(o.error_type in RESTART_AFTER for o in outcomes.values()):
            self._kill()
        return outcomes

    def _report(self, rank: int) -> str:
        """Where `rank` is now and its last collectives, as the worker writes them to its file."""
        worker = self._workers[rank]
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGUSR1)  # the worker appends its stacks to the report
            time.sleep(0.2)
        return worker.report_path.read_text() if worker.report_path.exists() else "no report"

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = []


@contextmanager
def _added_to_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What a child process inherits while this is open."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
