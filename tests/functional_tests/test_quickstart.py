"""The quickstart as a user runs it, and broken on purpose: its verdict tells them apart."""

import os
import subprocess
import sys

import pytest

from tests.functional_tests.cases import ROOT

ENTRY = "tests/functional_tests/broken_quickstart.py"


def run_quickstart(folder, *flags, **env_vars):
    return subprocess.run(
        ["bash", "examples/tiny_moe.sh", *flags],
        cwd=ROOT,
        env={**os.environ, "OUT": str(folder), "PYTHON": sys.executable, **env_vars},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


@pytest.mark.full
def test_quickstart_passes_and_draws_its_curve(tmp_path):
    done = run_quickstart(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "quickstart: passed" in done.stdout
    assert f"curve: {tmp_path}/loss.png" in done.stdout
    assert (tmp_path / "loss.png").stat().st_size > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("broken", "line"),
    [("attention", "FAILED validation loss, 0.2 below the bigram"), ("routing", "FAILED busiest expert / mean load")],
)
def test_broken_model_is_seen_to_fail(tmp_path, broken, line):
    done = run_quickstart(tmp_path, "--break", broken, ENTRY=ENTRY)
    assert done.returncode == 1, done.stdout[-3000:]
    assert line in done.stdout
