"""Ranks that share one GPU, each as if it were alone on a host of its own: NCCL between them, over loopback.

    logs = run_ranks(2, [[*FLAGS], [*FLAGS, "--overlap-moe-expert-parallel-comm"]], folder, limit_s=60)
    logs[rank][variant]            what a rank printed

NCCL refuses two ranks on one device of one host. Told that the hosts differ, it connects them by sockets: slow, but
kernels, streams and waits are those of a cluster. All command lines run in the same processes, one after the other; the
first word may be the path of another program than `pretrain_gpt.py`, from the repository's root. Shortly before the
time is over every rank prints the stacks of its threads; `before_the_limit` lets a program add what it knows.
"""

import faulthandler
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.common.forked_run import free_port

ROOT = Path(__file__).resolve().parents[2]
MARK = "=== variant "
PROGRAM = "pretrain_gpt.py"
DEADLINE = "RANKS_DEADLINE"
"""Environment: when the ranks are killed, seconds of `time.time`."""
REPORT_S = 5.0
"""So long before it they say where they stand."""
SHOWN = 8000
"""Characters of each log in the error."""


def run_ranks(num_ranks: int, variants: Sequence[Sequence[str]], folder: Path, limit_s: float) -> list[list[str]]:
    """Run the command lines on all ranks; what each printed, one text for each of them."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = [free_port() for _ in variants]
    lines = [list(words) if words[0].endswith(".py") else [PROGRAM, *words] for words in variants]
    paths = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    end = time.time() + limit_s
    work = json.dumps([lines, ports])
    ranks = [_start(rank, num_ranks, work, end, folder, path) for rank, path in enumerate(paths)]
    try:
        while any(rank.poll() is None for rank in ranks) and time.time() < end:
            if any(rank.poll() for rank in ranks):  # the others would wait for it
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = [path.read_text() for path in paths]
    statuses = [rank.returncode for rank in ranks]
    assert statuses == [0] * num_ranks, f"{statuses} within {limit_s} s:\n" + "\n".join(log[-SHOWN:] for log in logs)
    return [log.split(MARK)[1:] for log in logs]


def before_the_limit(report: Callable[[], None]) -> None:
    """Have a rank call `report` in a thread shortly before its time is over, if it still runs."""
    timer = threading.Timer(float(os.environ[DEADLINE]) - REPORT_S - time.time(), report)
    timer.daemon = True
    timer.start()


def _start(rank: int, num_ranks: int, work: str, end: float, folder: Path, log: Path) -> "subprocess.Popen[bytes]":
    places = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": 1,
        "NCCL_NVLS_ENABLE": 0,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": 1,
        "PYTHONUNBUFFERED": 1,
        DEADLINE: end,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    environment = {**os.environ, **{name: str(value) for name, value in places.items()}}
    words = [sys.executable, "-m", "tests.common.shared_gpu", work]
    with log.open("wb") as output:
        return subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _be_rank(work: str) -> int:
    """Run the programs in this process; returns the first status that is not 0."""
    faulthandler.dump_traceback_later(max(float(os.environ[DEADLINE]) - REPORT_S - time.time(), 0.1))
    for number, (words, port) in enumerate(zip(*json.loads(work), strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        sys.stdout.write(f"{MARK}{number}: {' '.join(words)}\n")
        sys.stdout.flush()
        sys.argv = [str(ROOT / words[0]), *words[1:]]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                return int(end.code) if isinstance(end.code, int) else 1
    return 0


if __name__ == "__main__":
    sys.exit(_be_rank(sys.argv[1]))
