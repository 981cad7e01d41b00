from types import SimpleNamespace

import pytest

from tests.common.missing_packages import MissingPackages


def finish(reason, is_fatal=True, outcome="skipped"):
    plugin = MissingPackages(SimpleNamespace(getoption=lambda name: is_fatal))
    plugin.pytest_runtest_logreport(
        SimpleNamespace(nodeid="f.py::t", skipped=outcome == "skipped", longrepr=("f.py", 1, reason))
    )
    session = SimpleNamespace(exitstatus=0)
    plugin.pytest_sessionfinish(session, 0)
    return session.exitstatus


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("Skipped: could not import 'tiktoken': No module named 'tiktoken'", pytest.ExitCode.TESTS_FAILED),
        ("Skipped: wandb is not installed", pytest.ExitCode.TESTS_FAILED),
        ("Skipped: needs an accelerator", 0),
    ],
)
def test_run_fails_if_a_package_was_missing(reason, status):
    assert finish(reason) == status


def test_missing_package_is_fine_where_nobody_asked():
    assert finish("Skipped: could not import 'tiktoken'", is_fatal=False) == 0


def test_failed_test_is_no_missing_package():
    assert finish("ImportError: could not import", outcome="failed") == 0
