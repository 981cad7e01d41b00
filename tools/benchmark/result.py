"""Write the result of a benchmark so that it can be judged later: figures, raw times, command, commit, machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.core import env

ROOT = Path(__file__).resolve().parents[2]


def _git(*words: str) -> str:
    answer = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def commit() -> tuple[str | None, bool]:
    """Return the commit that is checked out and whether tracked files differ from it.

    A machine that was given the files without their history is told by GIT_COMMIT which commit they are.
    """
    if told := env.git_commit():
        return told, False
    return _git("rev-parse", "HEAD") or None, bool(_git("status", "--porcelain", "--untracked-files=no"))


def processor() -> str:
    """Return the name of the processor, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write_result(path: Path, results: dict[str, Any]) -> None:
    """Write results with what they depend on, as JSON."""
    revision, is_dirty = commit()
    record = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": revision,
        "dirty": is_dirty,
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "machine": platform.machine(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
