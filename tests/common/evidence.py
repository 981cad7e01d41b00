"""Records what a test run showed, so that docs/claims.md can say when a claim was last seen to hold.

One JSON file per name: the command, the commit and whether files differed from it, the environment, and for each test
function the worst outcome of its cases and their number. Cases are folded, since a claim names a function.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.core import env

WORST_FIRST = ("error", "failed", "skipped", "xfailed", "passed")
PACKAGES = ("torch", "triton", "numpy", "pytest")


def fold(outcomes: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Fold case ids into functions: {"f.py::test[a]": "passed", ...} -> {"f.py::test": {"outcome", "cases"}}."""
    folded: dict[str, dict[str, Any]] = {}
    for nodeid, outcome in sorted(outcomes.items()):
        name = nodeid.split("[", 1)[0].split("@", 1)[0]
        entry = folded.setdefault(name, {"outcome": outcome, "cases": 0})
        entry["outcome"] = min(entry["outcome"], outcome, key=WORST_FIRST.index)
        entry["cases"] += 1
    return folded


def git_state(root: Path) -> tuple[str, bool]:
    """Return (commit, whether tracked files differ from it); evidence files themselves do not count.

    A machine that was given the files without their history is told by GIT_COMMIT which commit they are.
    """
    if told := env.git_commit():
        return told, False

    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = ask("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/evidence", ":!docs/claims.md")
    return ask("rev-parse", "HEAD") or "unknown", bool(changed)


def environment() -> dict[str, Any]:
    """Describe the machine and the packages."""
    import torch  # here, since only recorded runs may wait for it

    described: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "accelerator": None,
    }
    for name in PACKAGES:
        try:
            described[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            described[name] = None
    if torch.cuda.is_available():
        described["accelerator"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return described


class Recorder:
    """A pytest plugin of the controlling process; writes docs/evidence/NAME.json when the run ends."""

    def __init__(self, config: Any, root: Path) -> None:
        self.root = root
        self.name = config.getoption("--evidence")
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the call's outcome, or what set-up and tear-down spoiled."""
        is_expected_failure = hasattr(report, "wasxfail") and report.skipped
        outcome = "xfailed" if is_expected_failure else report.outcome
        if report.when != "call" and outcome == "failed":
            outcome = "error"
        if report.when == "call" or outcome != "passed":
            known = self.outcomes.get(report.nodeid, outcome)
            self.outcomes[report.nodeid] = min(known, outcome, key=WORST_FIRST.index)

    def pytest_sessionfinish(self) -> None:
        """Write the record; an interrupted run writes what it saw."""
        commit, is_dirty = git_state(self.root)
        record = {
            "command": " ".join(["pytest", *sys.argv[1:]]),
            "commit": commit,
            "dirty": is_dirty,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "environment": environment(),
            "outcomes": fold(self.outcomes),
        }
        file = self.root / "docs" / "evidence" / f"{self.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
