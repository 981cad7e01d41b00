"""Where every optional package is installed, a test skipped for a missing one hides a fault: it fails the run."""

from __future__ import annotations

import re
from typing import Any

import pytest

MISSING = re.compile(r"could not import|No module named|not installed|cannot be imported", re.IGNORECASE)


class MissingPackages:
    """Collects the tests that were skipped for an absent package, and fails the run for them when asked to."""

    def __init__(self, config: Any) -> None:
        self.is_fatal = config.getoption("--fail-on-missing-package")
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._look_at(report)

    def _look_at(self, report: Any) -> None:
        if report.skipped and MISSING.search(str(report.longrepr)):
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        if self.is_fatal and self.skipped and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.is_fatal and self.skipped:
            terminalreporter.section("skipped for a missing package: not allowed here")
            for nodeid in self.skipped:
                terminalreporter.line(nodeid)
