"""The kernels of the RMS norm on a GPU: against fp64, twice the same bits, and timed beside a copy."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.unit_tests.core.fusions.test_fused_rms_norm import CASES, check, make_case, norm_job
from tools.benchmark import memory_bound
from tools.benchmark.result import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))
SHARES_OF_COPY = {"norm forward": 0.85, "norm backward": 0.7}
"""Backward sums along the rows and down the columns of what it reads."""
LARGE = {
    "slice_a": ((4099, 2048), {"dtype": torch.bfloat16}),
    "slice_b": ((513, 7168), {"dtype": torch.bfloat16}),
    "many_heads": ((9001, 128), {"dtype": torch.bfloat16, "has_residual": False, "has_sum": False}),
}


def on_gpu(case):
    x, residual, weight, rule, grads = case
    moved = [None if leaf is None else leaf.cuda() for leaf in (x, residual, weight, *grads)]
    return *moved[:3], rule, moved[3:]


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_kernels_are_the_formula_and_repeat(name):
    shape, fields = (CASES | LARGE)[name]
    case = make_case(shape, **fields)
    first, second = norm_job(*on_gpu(case)), norm_job(*on_gpu(case))
    check(first, case)
    for one, other in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert one is None or torch.equal(one, other)


def test_bandwidth_is_near_that_of_a_copy():
    assert memory_bound.main(["--rows", "norm", "--sweep", "--folder", str(FOLDER)]) == 0
    rows = json.loads((FOLDER / "fused-norm.json").read_text(encoding="utf-8"))["results"]["rows"]
    chosen = {row["name"]: row["share_of_copy"] for row in reversed(rows)}  # the first of a name; others are swept
    assert all(chosen[name] >= share for name, share in SHARES_OF_COPY.items()), chosen
