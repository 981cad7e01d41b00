"""One rank of several processes that exchange rows: two engines side by side, and replays beside eager calls.

The processes have a GPU each, or share one (`share_gpu`): then NCCL takes them for hosts of their own and torch lets
their symmetric memory lie on one device. A kernel that waits for another process gets on when the GPU's time slices
change, so this is slow, and right.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron.core.fp8.wire import pack_rows, unpack_rows
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup, HybridEPEngine
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange
from tests.common.exchange_definition import LocalExchange
from tests.common.symm_mem_cases import Case


def join_ranks(rank: int, ranks: int, folder: str, share_gpu: bool = False) -> None:
    """Become one of the ranks of a NCCL group whose members meet in a folder."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    if share_gpu:
        places = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ.update(places | {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"})
    device = torch.device("cuda", 0 if share_gpu else rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", f"file://{folder}/store", rank=rank, world_size=ranks, device_id=device)


def four_operations(engine: HybridEPEngine, exchange: Exchange, hidden, probs, grads, is_packed=False):
    """Everything an engine returns on this rank; the first list up to the end of the last expert's rows."""
    engine.prepare(exchange)
    rows, row_probs = (engine.dispatch_packed if is_packed else engine.dispatch)(exchange, hidden, probs)
    forward, _ = engine.combine(exchange, rows, None)
    backward, slot_grads = engine.combine(exchange, rows, row_probs)
    regathered, _ = engine.dispatch(exchange, grads, None)
    return [rows, row_probs, regathered], [forward, backward, slot_grads, exchange.tokens_per_expert]


def compare_engines(case: Case, rank: int, engines: Sequence[type[HybridEPEngine]], device: str = "cuda") -> None:
    """Two engines on the same input, which all ranks draw alike, and beside the definition."""
    generator = case.generator(device)
    ids = case.expert_ids(device, generator)
    hidden, grads = (case.normal(list(case.tokens), device, generator) for _ in range(2))
    probs = [torch.rand(x.shape, device=device, generator=generator) for x in ids]
    setup = EngineSetup(dist.group.WORLD, case.experts, case.width, case.multiple)
    results = []
    for engine in engines:
        most = max(case.tokens) if case.budget is not None else None
        exchange = Exchange(expert_ids=ids[rank], max_tokens=most, row_budget=case.budget)
        given = (exchange, hidden[rank], probs[rank], grads[rank], case.is_packed)
        results.append((exchange, *four_operations(engine(setup), *given)))
    (exchange, padded, whole), (_, other_padded, other_whole) = results
    end = int(exchange.tokens_per_expert.sum())
    assert all(torch.equal(a[:end], b[:end]) for a, b in zip(padded, other_padded, strict=True)), case.name
    assert all(torch.equal(a, b) for a, b in zip(whole, other_whole, strict=True)), case.name
    arriving = [unpack_rows(pack_rows(one), case.width) for one in hidden] if case.is_packed else hidden
    wanted = LocalExchange(ids, case.experts, case.multiple, case.budget).dispatch(arriving, probs)[rank]
    assert torch.equal(padded[0][:end], wanted[0][:end]), case.name


def replay_with_new_routing(case: Case, rank: int, engine_class: type[HybridEPEngine], num_replays: int) -> None:
    """A captured pass follows the routing in its input; no host wait in it."""
    setup = EngineSetup(dist.group.WORLD, case.experts, case.width, case.multiple)
    engine, eager = engine_class(setup), engine_class(setup)

    def draw(seed: int) -> list[torch.Tensor]:
        seeded = replace(case, seed=seed)
        generator = seeded.generator("cuda")
        ids = seeded.expert_ids("cuda", generator)[rank]
        hidden, grads = (seeded.normal(list(case.tokens), "cuda", generator)[rank] for _ in range(2))
        return [ids, hidden, torch.rand(ids.shape, device="cuda", generator=generator), grads]

    def run(on: HybridEPEngine, ids, hidden, probs, grads) -> list[torch.Tensor]:
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
    for seed in range(1, num_replays + 1):
        fresh = draw(seed)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        wanted = run(eager, *fresh)
        assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True)), f"replay {seed}"
