"""The symm_mem engine between processes with a GPU each: the definition, and the collective engine, bit for bit."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.transformer.moe.dispatchers.hybridep.collective import CollectiveEngine
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem import SymmMemEngine
from tests.common.symm_mem_cases import Case, large
from tests.common.symm_mem_ranks import compare_engines, join_ranks, replay_with_new_routing
from tests.functional_tests.cases import find_cases, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

CASES = [
    large(),
    large(tokens=(0, 1), experts=1, topk=1),
    large(tokens=(4095, 16384), experts=64, topk=8, width=2048),
    large(tokens=(4096, 4095), experts=128, topk=8, width=7168),
    large(tokens=(700, 900), experts=3, topk=5, width=136, dtype="fp32", multiple=32),
    large(tokens=(2000, 1999), routing="one_rank", experts=5, topk=4, width=256, multiple=8),
    large(tokens=(1000, 1), routing="holes", experts=8, topk=8, width=384),
    large(tokens=(1000, 1000), budget=1500, experts=8, topk=2, width=384, multiple=16),
    large(tokens=(4096, 4095), experts=128, topk=8, width=7168, is_packed=True),
    large(tokens=(1000, 900), budget=1500, experts=8, topk=2, width=384, multiple=16, is_packed=True),
]
STATIC = Case(tokens=(500, 333), experts=8, topk=4, width=512, multiple=16, budget=3000)
NUM_REPLAYS = 100


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """One process."""
    join_ranks(rank, ranks, folder)
    for case in CASES:
        compare_engines(case, rank, (SymmMemEngine, CollectiveEngine))
    replay_with_new_routing(STATIC, rank, SymmMemEngine, NUM_REPLAYS)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def test_engines_agree_bit_for_bit_eager_and_replayed():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (2, str(Path(folder))), nprocs=2)


def test_training_gives_the_same_bits_with_both_engines(tmp_path):
    (case,) = find_cases(["gpt_moe/ep2_fp32"])
    flags = {"--device": "cuda", "--bf16": True, "--deterministic-mode": True, "--log-state-hash": True}
    flags |= {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": "hybridep"}
    hashes = {}
    for engine in ("symm_mem", "collective"):
        args = case.model_args | flags | {"--moe-hybridep-engine": engine}
        environment = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
        log = launch(replace(case, model_args=args, env_vars=environment), tmp_path / engine / "run")
        hashes[engine] = re.findall(r"state hash: ([0-9a-f]{16}) \|", log)
    assert len(hashes["symm_mem"]) > 1
    assert hashes["symm_mem"] == hashes["collective"]
