"""Pipelines: the curve of one GPU, the memory of the formula, the cost of the executor; stages may share one GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.common import shared_gpu
from tests.gpu_tests.test_two_gpus import ENVIRONMENT, FEW_LAYERS, NUM_STEPS, run

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
FOLDER = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))

WAYS = {
    "pp2": {"--pipeline-model-parallel-size": 2},
    "pp2_vpp2": {"--pipeline-model-parallel-size": 2, "--num-virtual-stages-per-pipeline-rank": 2},
    "pp2_batched": {"--pipeline-model-parallel-size": 2, "--no-overlap-p2p-communication": True},
}


@pytest.fixture(scope="module")
def one_gpu_losses(tmp_path_factory):
    metrics, _ = run(tmp_path_factory.mktemp("one"), FEW_LAYERS, dense=True, num_processes=1)
    return metrics["lm loss"]


@needs_two_gpus
@pytest.mark.parametrize("way", WAYS)
def test_pipeline_curve_is_that_of_one_gpu(tmp_path, way, one_gpu_losses):
    two, _ = run(tmp_path, FEW_LAYERS | WAYS[way], dense=True)
    differences = [abs(two["lm loss"][step] / value - 1) for step, value in one_gpu_losses.items()]
    print(f"{way}: largest relative difference {max(differences):.2e}")
    assert len(differences) == NUM_STEPS
    assert max(differences) < 1e-2


def check_figures(out):
    """Ranks hold the model, and no more than the formula says, within 3 %."""
    ranks = json.loads(out.read_text())["results"]["figures"]
    for figures in ranks:
        print(figures)
    assert 9e8 < sum(figures["parameters"] for figures in ranks) < 1.4e9
    deviations = [figures["deviation"] for figures in ranks]
    assert all(abs(deviation) < 0.03 for deviation in deviations), deviations
    assert all(figures["overhead_us_per_action"] < 500 for figures in ranks)


@needs_two_gpus
@pytest.mark.parametrize("vpp", [None, 2])
def test_peak_memory_is_that_of_the_formula(tmp_path, vpp):
    out = tmp_path / "figures.json"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["tools/benchmark/pipeline.py", "--out", str(out), *([] if vpp is None else ["--vpp", str(vpp)])]
    subprocess.run(words, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, check=True, timeout=100)
    check_figures(out)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("num_stages", "vpp"), [(2, None), (2, 2), (4, None)])
def test_peak_memory_of_stages_on_one_gpu_is_that_of_the_formula(tmp_path, num_stages, vpp):
    out = FOLDER / f"pipeline-pp{num_stages}-vpp{vpp or 1}-1gpu.json"
    line = ["tools/benchmark/pipeline.py", "--out", str(out), *([] if vpp is None else ["--vpp", str(vpp)])]
    shared_gpu.run_ranks(num_stages, [line], tmp_path, limit_s=80)
    check_figures(out)
