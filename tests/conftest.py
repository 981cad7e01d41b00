"""What holds for every test: one thread, a hard time limit, who may run side by side, and records of outcomes.

--fail-on-missing-package   a test skipped because a package is absent fails the run (CI installs them all)
--evidence NAME             write the outcomes to docs/evidence/NAME.json, for docs/claims.md
"""

from __future__ import annotations

import os

# Before torch is imported anywhere, worker processes included: two cores are shared by many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

from pathlib import Path

import pytest

from tests.common.evidence import Recorder
from tests.common.missing_packages import MissingPackages

pytest_plugins = ("tests.common.fixtures",)

ROOT = Path(__file__).parents[1]
# Fixtures that start worker processes: their tests share one pool, so all of them go to the same pytest process.
POOL_FIXTURES = frozenset({"pool", "worker_pool", "interpreted"})
TIMEOUT_FULL = 600
TIMEOUT_LAUNCH = 300


def pytest_addoption(parser):
    parser.addoption("--evidence", metavar="NAME", help="write the outcomes to docs/evidence/NAME.json")
    parser.addoption("--fail-on-missing-package", action="store_true", help="fail if a package was missing for a test")


def pytest_configure(config):
    config.pluginmanager.register(MissingPackages(config), "missing-packages")
    if config.getoption("--evidence") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config, ROOT), "evidence-recorder")


def pytest_collection_modifyitems(items):
    by_address = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if by_address:
        raise pytest.UsageError(f"{by_address[0]}: an address in a test's id differs between processes; give ids")
    for item in items:
        is_launch = "functional_tests" in item.path.parts
        if item.get_closest_marker("timeout") is None and (is_launch or item.get_closest_marker("full")):
            item.add_marker(pytest.mark.timeout(TIMEOUT_FULL if item.get_closest_marker("full") else TIMEOUT_LAUNCH))
        if is_launch:
            item.add_marker(pytest.mark.xdist_group("launch"))
        elif POOL_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("pool"))
