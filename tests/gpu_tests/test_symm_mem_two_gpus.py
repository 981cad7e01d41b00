"""The symm_mem engine between processes with a GPU each: the definition, and the collective engine, bit for bit."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.transformer.moe.dispatchers.hybridep.collective import CollectiveEngine
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem import SymmMemEngine
from tests.common.exchange_definition import LocalExchange
from tests.common.symm_mem_cases import Case, large
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
]
NUM_REPLAYS = 100


def four_operations(engine, exchange, hidden, probs, grads):
    """Everything an engine returns on this rank, up to the end of the last expert's rows."""
    engine.prepare(exchange)
    rows, row_probs = engine.dispatch(exchange, hidden, probs)
    forward, _ = engine.combine(exchange, rows, None)
    backward, slot_grads = engine.combine(exchange, rows, row_probs)
    regathered, _ = engine.dispatch(exchange, grads, None)
    return [rows, row_probs, regathered], [forward, backward, slot_grads, exchange.tokens_per_expert]


def compare_engines(case: Case, rank: int) -> None:
    """Both engines on the same input, which all ranks draw alike."""
    generator = case.generator("cuda")
    ids = case.expert_ids("cuda", generator)
    hidden, grads = (case.normal(list(case.tokens), "cuda", generator) for _ in range(2))
    probs = [torch.rand(x.shape, device="cuda", generator=generator) for x in ids]
    setup = EngineSetup(dist.group.WORLD, case.experts, case.width, case.multiple)
    results = []
    for engine in (SymmMemEngine(setup), CollectiveEngine(setup)):
        most = max(case.tokens) if case.budget is not None else None
        exchange = Exchange(expert_ids=ids[rank], max_tokens=most, row_budget=case.budget)
        results.append((exchange, *four_operations(engine, exchange, hidden[rank], probs[rank], grads[rank])))
    (exchange, padded, whole), (_, other_padded, other_whole) = results
    end = int(exchange.tokens_per_expert.sum())
    assert all(torch.equal(a[:end], b[:end]) for a, b in zip(padded, other_padded, strict=True)), case.name
    assert all(torch.equal(a, b) for a, b in zip(whole, other_whole, strict=True)), case.name
    wanted = LocalExchange(ids, case.experts, case.multiple, case.budget).dispatch(hidden, probs)[rank]
    assert torch.equal(padded[0][:end], wanted[0][:end]), case.name


def replay_with_new_routing(rank: int) -> None:
    """A captured pass follows the routing in its input; no host wait in it."""
    case = Case(tokens=(500, 333), experts=8, topk=4, width=512, multiple=16, budget=3000)
    setup = EngineSetup(dist.group.WORLD, case.experts, case.width, case.multiple)
    engine, eager = SymmMemEngine(setup), SymmMemEngine(setup)

    def draw(seed: int) -> list[torch.Tensor]:
        seeded = replace(case, seed=seed)
        generator = seeded.generator("cuda")
        ids = seeded.expert_ids("cuda", generator)[rank]
        hidden, grads = (seeded.normal(list(case.tokens), "cuda", generator)[rank] for _ in range(2))
        return [ids, hidden, torch.rand(ids.shape, device="cuda", generator=generator), grads]

    def run(on: SymmMemEngine, ids, hidden, probs, grads) -> list[torch.Tensor]:
        exchange = Exchange(expert_ids=ids, max_tokens=max(case.tokens), row_budget=case.budget)
        return four_operations(on, exchange, hidden, probs, grads)[1]

    static = draw(0)
    run(engine, *static)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    run(engine, *static)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(engine, *static)
    for seed in range(1, NUM_REPLAYS + 1):
        fresh = draw(seed)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        wanted = run(eager, *fresh)
        assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True)), f"replay {seed}"


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """One process."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl", store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    for case in CASES:
        compare_engines(case, rank)
    replay_with_new_routing(rank)
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
