"""The worker's side of `pool`: receive a job, be a rank, send the outcome, forget everything."""

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tests.common.collective_log import CollectiveLog

LEAVE_SECONDS = 5.0
LAST_COLLECTIVES = 20
# What most jobs import, so that its import does not count against the first job's deadline.
PRELOADED = "tests.common.layouts"


@dataclass(frozen=True)
class Job:
    """What one rank needs to know; the same for all ranks of a job."""

    module: str
    file: str
    qualname: str
    args: tuple[Any, ...]
    world_size: int
    store_prefix: str
    group_timeout: timedelta


@dataclass(frozen=True)
class Outcome:
    """A result, or an exception as text."""

    result: Any = None
    error_type: str | None = None
    traceback: str = ""

    @classmethod
    def failed(cls, error_type: str, text: str) -> "Outcome":
        """An outcome without result."""
        return cls(None, error_type, text)


def worker_main(rank: int, pipe: Connection, report_path: str, store_port: int) -> None:
    """Serve jobs as rank `rank` until the parent closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then closes the pipe
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with open(report_path, "a") as report:
        faulthandler.register(signal.SIGUSR1, file=report, all_threads=True)
        _warm_up()
        # One connection for all jobs: the server keeps every connection open that was ever made.
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        pipe.send_bytes(b"ready")
        while True:
            try:
                payload = pipe.recv_bytes()
            except (EOFError, OSError):
                return
            report.seek(0)
            report.truncate()
            outcome, is_success = _run(rank, payload, store, report)
            pipe.send_bytes(outcome)
            _leave(payload, store, is_success)  # the parent can go on meanwhile
            reset_process()


class GroupSetupError(RuntimeError):
    """The default group was not made; torch counts such attempts, so this process cannot meet the others again."""


def _warm_up() -> None:
    """Do once what torch does lazily at first use, so that the first job is no slower than the others."""
    importlib.import_module(PRELOADED)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with CollectiveLog():
        x = torch.ones(1, requires_grad=True)
        (x * x).backward()
        dist.all_reduce(x.detach())
    reset_process()
    gc.freeze()  # what is loaded now stays; collections between jobs need not look at it


def _leave(payload: bytes, store: dist.Store, is_success: bool) -> None:
    """Wait a moment for the other ranks of a job that went well: they may still be connecting to groups of this one.

    After a failure nobody is waited for: peers inside a collective must see this rank go.
    """
    if dist.is_initialized():
        job: Job = pickle.loads(payload)
        ended = dist.PrefixStore(job.store_prefix, store)
        missing = job.world_size - ended.add("ended", 1)
        until = time.monotonic() + LEAVE_SECONDS
        while is_success and missing > 0 and time.monotonic() < until:
            time.sleep(0.002)
            missing = job.world_size - ended.add("ended", 0)


def _run(rank: int, payload: bytes, store: dist.Store, report: Any) -> tuple[bytes, bool]:
    """Run one job; returns its pickled outcome, whatever happens, and whether it went well."""
    log = CollectiveLog(keep_last=LAST_COLLECTIVES, sink=report)
    try:
        job: Job = pickle.loads(payload)
        function = _load(job)
        torch.manual_seed(0)
        job_store = dist.PrefixStore(job.store_prefix, store)
        try:
            dist.init_process_group(
                "gloo", store=job_store, rank=rank, world_size=job.world_size, timeout=job.group_timeout
            )
        except Exception as error:
            raise GroupSetupError(f"rank {rank} of {job.world_size}: the default group was not made") from error
        with log:
            return pickle.dumps(Outcome(function(*job.args))), True
    except BaseException as error:  # noqa: BLE001  a worker reports every failure, SystemExit included
        text = traceback.format_exc() + "last collectives:\n" + log.text()
        return pickle.dumps(Outcome.failed(type(error).__name__, text)), False


def _load(job: Job) -> Callable[..., Any]:
    """Find the job's function by module name, or by file if pytest alone knows that name."""
    module = sys.modules.get(job.module)
    if module is None:
        if job.module.startswith("tests."):
            module = importlib.import_module(job.module)
        else:
            spec = importlib.util.spec_from_file_location(job.module, job.file)
            assert spec is not None, f"no module at {job.file}"
            assert spec.loader is not None, f"nothing loads {job.file}"
            module = importlib.util.module_from_spec(spec)
            sys.modules[job.module] = module
            spec.loader.exec_module(module)
    assert module.__file__ == job.file, f"{job.module} is {module.__file__} here and {job.file} in the parent"
    function: Any = module
    for part in job.qualname.split("."):
        function = getattr(function, part)
    return function


def reset_process() -> None:
    """Destroy all groups, call `reset()` of every megatron module that has one, restore torch's defaults."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and callable(getattr(module, "reset", None)):
            module.reset()
    # A gloo group owns threads until its last reference goes; models hold groups in reference cycles.
    gc.collect()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002  the process-wide state is what a job may have left behind
    torch.manual_seed(0)
