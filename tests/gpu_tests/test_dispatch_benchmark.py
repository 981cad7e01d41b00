"""The dispatch benchmark prints its table, and kernels that move rows are near a copy; the figures go to $OUT."""

import json
import os
from pathlib import Path

import pytest
import torch

from tools.benchmark import dispatch
from tools.benchmark.result import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLACE = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))
FOLDER = ["--folder", str(PLACE)]
SHARE_OF_COPY = 0.85
NEAR_A_COPY = ("expand", "reduce", "add", "permute", "unpermute")
"""Not push, which has one block per multiprocessor: enough for a link, not for the memory that stands in for it."""


def test_kernels_have_the_bandwidth_of_a_copy():
    assert dispatch.main(FOLDER) == 0
    results = json.loads((PLACE / "dispatch-1gpu.json").read_text(encoding="utf-8"))["results"]
    del results["copy_gb_per_s"]
    shares = {(shape, name): rows[name]["share_of_copy"] for shape, rows in results.items() for name in NEAR_A_COPY}
    assert all(share >= SHARE_OF_COPY for share in shares.values()), shares


def test_kernels_are_timed_on_a_part_of_the_device():
    assert dispatch.main(["--sms", "24", *FOLDER]) == 0


def test_tilings_are_swept():
    assert dispatch.main(["--sweep", *FOLDER]) == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_operations_are_timed_between_two_gpus():
    assert dispatch.main(["--gpus", "2", *FOLDER]) == 0
