"""Runs `pretrain_gpt.py` on n ranks without a launcher: forks of the test process, which has imported torch already.

A launch costs a second instead of ten. Ranks meet over loopback, each with one thread; a run that outlasts its deadline
is killed and fails. `torchrun` itself is tested in tests/functional_tests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.utils.logging import ROOT_NAME

DEADLINE_S = 60.0
PORTS = 15_000, 32_000


@dataclass(frozen=True)
class RankResult:
    """What one rank left behind."""

    status: int
    """exit status; minus the signal if one ended it"""
    output: str
    """standard output and error"""

    def hashes(self) -> list[str]:
        """The state hashes of its log lines, in order."""
        return re.findall(r"state hash: ([0-9a-f]{16}) \|", self.output)

    def losses(self) -> list[float]:
        """The losses of its log lines, in order."""
        return [float(text) for text in re.findall(r"lm loss: ([0-9.E+-]+) \|", self.output)]


def free_port() -> int:
    """A port of loopback that nobody listens on, from below those that the system gives to sockets without a wish."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_ranks(world_size: int, body: Callable[[], int], outputs: Path) -> list[int]:
    """Fork `world_size` ranks that run `body` and exit with what it returns; returns the process ids."""
    port = free_port()
    return [_fork(rank, world_size, port, body, outputs / f"rank{rank}.log") for rank in range(world_size)]


def _fork(rank: int, world_size: int, port: int, body: Callable[[], int], log: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    log.write_text("")  # there before the rank is, for whoever watches it
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        logging.getLogger(ROOT_NAME).handlers.clear()  # those of the parent write where the parent does
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        status = body()
    except Exception:  # noqa: BLE001  the child must never return into the test runner
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_ranks(children: Sequence[int], outputs: Path, deadline_s: float = DEADLINE_S) -> list[RankResult]:
    """Collect the ranks; kills all of them and fails if one is still running after the deadline."""
    statuses: dict[int, int] = {}
    end = time.monotonic() + deadline_s
    while len(statuses) < len(children) and time.monotonic() < end:
        for child in set(children) - set(statuses):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    late = set(children) - set(statuses)
    for child in late:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    logs = [(outputs / f"rank{rank}.log").read_text() for rank in range(len(children))]
    assert not late, f"ranks still running after {deadline_s} s:\n" + "\n".join(log[-3000:] for log in logs)
    return [RankResult(statuses[child], log) for child, log in zip(children, logs, strict=True)]


def run_ranks(world_size: int, argv: Sequence[str], deadline_s: float = DEADLINE_S) -> list[RankResult]:
    """Run `pretrain_gpt.py argv` on `world_size` ranks to its end."""
    import pretrain_gpt

    def body() -> int:
        sys.argv = ["pretrain_gpt.py", *argv]
        return pretrain_gpt.main()

    with tempfile.TemporaryDirectory() as folder:
        return wait_ranks(start_ranks(world_size, body, Path(folder)), Path(folder), deadline_s)
