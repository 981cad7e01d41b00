"""Ranks that share one GPU, each as if it were alone on a host of its own: NCCL between them, over loopback.

    logs = run_ranks(2, [[*FLAGS], [*FLAGS, "--overlap-moe-expert-parallel-comm"]], folder, limit_s=60)
    logs[rank][variant]            what a rank printed

NCCL refuses two ranks on one device of one host. Told that the hosts differ, it connects them by sockets: slow, but
kernels, streams and waits are those of a cluster. All command lines run in the same processes, one after the other; the
first word may be the path of another program than `pretrain_gpt.py`, from the repository's root.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.common.forked_run import free_port

ROOT = Path(__file__).resolve().parents[2]
MARK = "=== variant "
PROGRAM = "pretrain_gpt.py"


def run_ranks(num_ranks: int, variants: Sequence[Sequence[str]], folder: Path, limit_s: float) -> list[list[str]]:
    """Run the command lines on all ranks; what each printed, one text for each of them."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = [free_port() for _ in variants]
    lines = [list(words) if words[0].endswith(".py") else [PROGRAM, *words] for words in variants]
    paths = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    ranks = [_start(rank, num_ranks, json.dumps([lines, ports]), folder, path) for rank, path in enumerate(paths)]
    end = time.monotonic() + limit_s
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.poll() for rank in ranks):  # the others would wait for it
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = [path.read_text() for path in paths]
    statuses = [rank.returncode for rank in ranks]
    assert statuses == [0] * num_ranks, f"{statuses} within {limit_s} s:\n" + "\n".join(log[-4000:] for log in logs)
    return [log.split(MARK)[1:] for log in logs]


def _start(rank: int, num_ranks: int, work: str, folder: Path, log: Path) -> "subprocess.Popen[bytes]":
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
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    environment = {**os.environ, **{name: str(value) for name, value in places.items()}}
    words = [sys.executable, "-m", "tests.common.shared_gpu", work]
    with log.open("wb") as output:
        return subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _be_rank(work: str) -> int:
    """Run the programs in this process; returns the first status that is not 0."""
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
