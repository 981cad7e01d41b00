"""The sweep of weight gradients goes on when a candidate hangs, and needs a GPU."""

import subprocess
import sys

import pytest
import torch

from tools.benchmark import wgrad_sweep


def told(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.full
def test_lines_told_before_a_hang_are_kept():
    process = told("import time; print('{\"ms\": 1}', flush=True); print('noise', flush=True); time.sleep(60)")
    found, ending = wgrad_sweep.finish(process, 5)
    assert ending.startswith("ran longer")
    assert found == [{"ms": 1}]


def test_an_exit_code_is_reported():
    assert wgrad_sweep.finish(told("raise SystemExit(3)"), 30) == ([], "exit code 3")


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs where there is no GPU")
def test_the_sweep_needs_a_gpu():
    with pytest.raises(SystemExit):
        wgrad_sweep.main([])
