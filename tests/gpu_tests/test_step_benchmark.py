"""Whole steps of the model slices on a GPU, timed; tables are printed, result files go to $OUT or the evidence."""

import os
from pathlib import Path

import pytest
import torch

from tools.benchmark import step
from tools.benchmark.result import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))


@pytest.mark.parametrize("name", step.SLICES)
def test_captured_step_is_timed(name):
    assert step.main(["--slice", name, "--variants", "graph", "--folder", str(FOLDER)]) == 0


@pytest.mark.parametrize("variant", ["eager", "drop-pad", "overflow"])
@pytest.mark.parametrize("name", step.SLICES)
def test_row_beside_it_is_timed(name, variant):
    assert step.main(["--slice", name, "--variants", variant, "--folder", str(FOLDER)]) == 0


@pytest.mark.parametrize("name", step.SLICES)
def test_captured_step_in_fp8_is_timed(name):
    rows = ["--variants", "graph", "--precisions", "fp8"]
    assert step.main(["--slice", name, *rows, "--folder", str(FOLDER)]) == 0


@pytest.mark.parametrize("name", step.SLICES)
def test_kernels_of_a_captured_step_are_listed(name):
    assert step.main(["--slice", name, "--variants", "graph", "--kernels", "--folder", str(FOLDER)]) == 0


@pytest.mark.parametrize("name", step.SLICES)
def test_kernels_of_a_captured_step_in_fp8_are_listed(name):
    words = ["--variants", "graph", "--kernels", "--precisions", "fp8"]
    assert step.main(["--slice", name, *words, "--folder", str(FOLDER)]) == 0
