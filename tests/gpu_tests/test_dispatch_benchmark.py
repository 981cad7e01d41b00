"""The dispatch benchmark runs to its end and prints its table; the figures go to $OUT."""

import os

import pytest
import torch

from tools.benchmark import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FOLDER = ["--folder", os.environ["OUT"]] if "OUT" in os.environ else []


@pytest.mark.parametrize("words", [[], ["--sms", "24"]], ids=["all", "24-sms"])
def test_kernels_are_timed_beside_a_copy(words):
    assert dispatch.main([*words, *FOLDER]) == 0


def test_tilings_are_swept():
    assert dispatch.main(["--sweep", *FOLDER]) == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_operations_are_timed_between_two_gpus():
    assert dispatch.main(["--gpus", "2", *FOLDER]) == 0
