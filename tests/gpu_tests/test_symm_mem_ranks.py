"""The symm_mem engine between processes that share one GPU: the definition and the collective engine, bit for bit.

The buffers are those of torch's symmetric memory. What needs links between GPUs is in test_symm_mem_two_gpus.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import RankFailure
from megatron.core.transformer.moe.dispatchers.hybridep.collective import CollectiveEngine
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem import SymmMemEngine
from tests.common.symm_mem_cases import Case, large
from tests.common.symm_mem_ranks import compare_engines, join_ranks, replay_with_new_routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = {
    2: [
        large(),
        large(tokens=(0, 1), experts=1, topk=1),
        large(tokens=(4095, 700), experts=8, topk=8, width=2048),
        large(tokens=(200, 199), routing="one_rank", experts=5, topk=4, width=256, multiple=8),
        large(tokens=(1000, 1), routing="holes", experts=8, topk=8, width=384),
        large(tokens=(1000, 1000), budget=1500, experts=8, topk=2, width=384, multiple=16),
        large(tokens=(300, 500), experts=3, topk=5, width=136, is_packed=True),
        large(tokens=(1000, 900), budget=1500, experts=8, topk=2, width=384, multiple=16, is_packed=True),
    ],
    4: [
        large(tokens=(63, 0, 65, 1), experts=2, topk=3),
        large(tokens=(300, 301, 302, 303), routing="skip_rank", experts=5, topk=4, width=256, is_packed=True),
    ],
}
STATIC = Case(tokens=(500, 333), experts=8, topk=4, width=512, multiple=16, budget=3000)
NUM_REPLAYS = 20


def compare_job(rank: int, ranks: int, folder: str) -> None:
    """One process."""
    join_ranks(rank, ranks, folder, share_gpu=True)
    for case in CASES[ranks]:
        compare_engines(case, rank, (SymmMemEngine, CollectiveEngine))
    if ranks == len(STATIC.tokens):
        replay_with_new_routing(STATIC, rank, SymmMemEngine, NUM_REPLAYS)
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", CASES)
def test_processes_on_one_gpu_agree_bit_for_bit(tmp_path, num_ranks):
    torch.multiprocessing.spawn(compare_job, (num_ranks, str(tmp_path)), nprocs=num_ranks)


def lonely_job(rank: int, ranks: int, folder: str) -> None:
    """Rank 1 is gone before the second exchange; rank 0 writes down what it is told about that."""
    join_ranks(rank, ranks, folder, share_gpu=True)
    engine = SymmMemEngine(EngineSetup(dist.group.WORLD, 2, 128), timeout_s=1.0)
    hidden, probs = torch.ones(5, 128, device="cuda", dtype=torch.bfloat16), torch.ones(5, 1, device="cuda")
    told = []
    for exchange_number in range(2):
        exchange = Exchange(expert_ids=torch.full((5, 1), 2, dtype=torch.int32, device="cuda"), max_tokens=5)
        exchange.row_budget = 64
        engine.prepare(exchange)
        if exchange_number == 1 and rank == 1:
            break
        try:
            engine.dispatch(exchange, hidden, probs)
            torch.cuda.synchronize()
        except RuntimeError as error:
            told.append(str(error).splitlines()[0])
    try:
        engine.raise_if_dead()
    except RankFailure as failure:
        told.append(str(failure))
    Path(folder, f"told{rank}").write_text("\n".join(told))
    sys.stdout.flush()
    os._exit(0)  # a device that has trapped does not let its process end in order


def test_process_that_left_is_named_by_the_other(tmp_path):
    torch.multiprocessing.spawn(lonely_job, (2, str(tmp_path)), nprocs=2)
    assert (tmp_path / "told1").read_text() == ""
    error, failure = (tmp_path / "told0").read_text().splitlines()
    assert "CUDA error" in error
    assert failure == "rank 0 of the expert ranks: no message in time from rank 1 in dispatch."
