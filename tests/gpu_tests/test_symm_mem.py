"""The symm_mem engine natively on one GPU: W ranks in this process, each on a stream of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem import SymmMemEngine
from tests.common.symm_mem_cases import NATIVE_CASES, NATIVE_PACKED_CASES, Case, Ranks, large, run_case
from tests.common.symm_mem_rounds import Rounds
from tests.gpu_tests.test_moe_layer import build_layer, run_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STATIC = Case(tokens=(500, 333), experts=8, topk=4, width=512, multiple=16, budget=3000)


@pytest.fixture
def no_waiting():
    """Called around work during which the host must not wait for the device."""
    yield lambda mode: torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.set_sync_debug_mode("default")


def inputs(case, seed=0, device="cuda"):
    """Ids, hidden, probs, row gradients and their probabilities of all ranks."""
    generator = torch.Generator(device).manual_seed(seed)
    ids = case.expert_ids(device, generator)
    hidden = case.normal(list(case.tokens), device, generator)
    probs = [torch.rand(x.shape, device=device, generator=generator) for x in ids]
    rows = case.normal([case.budget] * len(case.tokens), device, generator)
    row_probs = [torch.rand(case.budget, device=device, generator=generator) for _ in case.tokens]
    return ids, hidden, probs, rows, row_probs


def pass_through(ranks, case, ids, hidden, probs, rows, row_probs):
    """All four operations; returns the filled part of every result, the rest as zeros."""
    exchanges = ranks.exchanges(case, ids)
    sent = ranks.dispatch(exchanges, hidden, probs)
    forward = ranks.combine(exchanges, rows, None)
    backward = ranks.combine(exchanges, rows, row_probs)
    regathered = ranks.dispatch(exchanges, hidden, None)
    results = []
    for rank, exchange in enumerate(exchanges):
        is_filled = torch.arange(case.budget, device=rows[0].device) < exchange.tokens_per_expert.sum()
        for tensor in (*sent[rank], regathered[rank][0]):
            mask = is_filled.view(-1, *[1] * (tensor.ndim - 1))
            results.append(torch.where(mask, tensor, 0))
        results += [forward[rank][0], *backward[rank], exchange.tokens_per_expert, exchange.dropped_rows]
    return results


@pytest.mark.parametrize("case", NATIVE_CASES, ids=lambda case: case.name)
def test_exchange_equals_its_definition_bit_for_bit(case):
    torch.cuda.empty_cache()
    assert run_case(case, "cuda") == []


@pytest.mark.parametrize("case", NATIVE_PACKED_CASES, ids=lambda case: case.name)
def test_packed_rows_equal_their_definition_bit_for_bit(case):
    torch.cuda.empty_cache()
    assert run_case(case, "cuda") == []


def test_buffers_grow_when_one_rank_brings_more():
    small, grown = large(tokens=(4, 4)), large(tokens=(9, 4), seed=1)
    ranks = Ranks(small, "cuda")
    for case in (small, grown, small, large(tokens=(200, 70), seed=2), grown):
        assert run_case(case, "cuda", ranks) == []


def test_host_never_waits_under_a_row_budget(no_waiting):
    ranks, tensors = Ranks(STATIC, "cuda"), inputs(STATIC)
    for mode in ("default", "error"):
        no_waiting(mode)
        pass_through(ranks, STATIC, *tensors)


def test_exact_sizes_make_the_host_wait_once(no_waiting):
    case = large()
    ranks = Ranks(case, "cuda")
    assert run_case(case, "cuda", ranks) == []
    ids, hidden, probs, *_ = inputs(large(budget=600))
    no_waiting("error")
    exchanges = ranks.exchanges(case, ids)  # the counts are read through an event, which this mode does not report
    assert len(ranks.dispatch(exchanges, hidden, probs)) == 2


def test_replay_with_new_routing_equals_eager():
    ranks, eager = Ranks(STATIC, "cuda"), Ranks(STATIC, "cuda")
    static = inputs(STATIC)
    pass_through(ranks, STATIC, *static)
    graph = torch.cuda.CUDAGraph()
    ranks.group.joins_phases = True
    with torch.cuda.graph(graph):
        captured = pass_through(ranks, STATIC, *static)
    for replay in range(100):
        fresh = inputs(STATIC, seed=replay + 1)
        for target, source in zip(static, fresh, strict=True):
            for old, new in zip(target, source, strict=True):
                old.copy_(new)
        graph.replay()
        wanted = pass_through(eager, STATIC, *fresh)
        torch.cuda.synchronize()
        wrong = [i for i, (a, b) in enumerate(zip(captured, wanted, strict=True)) if not torch.equal(a, b)]
        assert not wrong, f"replay {replay}: results {wrong} differ"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_delays_on_the_streams_change_nothing(num_ranks):
    case = Case(tokens=(65, 33, 7, 64)[:num_ranks], experts=3, topk=3, width=128, budget=800)
    ranks = Ranks(case, "cuda")
    wanted = pass_through(ranks, case, *inputs(case))
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        for rank in ranks.group.ranks:
            with rank.as_current():
                torch.cuda._sleep(int(torch.randint(0, 200_000, (1,), generator=generator)))
        got = pass_through(ranks, case, *inputs(case))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


ROUNDS = {2: 100_000, 4: 20_000}
ROUNDS_PER_GRAPH = 20


@pytest.mark.parametrize("num_ranks", ROUNDS)
def test_messages_arrive_whole_in_many_rounds(num_ranks):
    case = Case(tokens=(40, 23, 31, 9)[:num_ranks], experts=2, topk=3, width=64, budget=400)
    rounds = Rounds(case)
    rounds.run_delayed(1000)
    torch.cuda.synchronize()
    assert rounds.num_wrong.item() == 0, f"{rounds.num_wrong.item()} wrong in 1000 eager rounds"
    graph = torch.cuda.CUDAGraph()
    rounds.ranks.group.joins_phases = True
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS_PER_GRAPH):
            rounds.run()
    begin = time.monotonic()
    while rounds.number.item() < ROUNDS[num_ranks]:
        for _ in range(10):
            graph.replay()
    assert rounds.num_wrong.item() == 0, f"{rounds.num_wrong.item()} wrong in {rounds.number.item()} rounds"
    print(f"W={num_ranks}: {rounds.number.item()} rounds, those in graphs in {time.monotonic() - begin:.1f} s")


ONE_QUEUE = """
import torch
from tests.common.symm_mem_cases import Case
from tests.common.symm_mem_rounds import Rounds
rounds = Rounds(Case(tokens=(40, 23, 31, 9), experts=2, topk=3, width=64, budget=400))
rounds.run_delayed(300)
torch.cuda.synchronize()
print("rounds", rounds.number.item(), "wrong", rounds.num_wrong.item())
"""


def run_script(script, **environment):
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-c", script]
    environment = {**os.environ, **environment}
    return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=90, check=False)


def test_rounds_end_with_a_single_hardware_queue():
    done = run_script(ONE_QUEUE, CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert "rounds 300 wrong 0" in done.stdout, done.stdout + done.stderr[-2000:]


def test_steps_leave_memory_and_handles_flat():
    exact, ranks, tensors = large(tokens=(300, 200)), Ranks(STATIC, "cuda"), inputs(STATIC)
    others = Ranks(exact, "cuda")
    used = []
    for step in range(200):
        pass_through(ranks, STATIC, *tensors)
        if step % 20 == 0:
            assert run_case(exact, "cuda", others) == []
        torch.cuda.synchronize()
        buffers = sum(len(one.group._allocations) for one in (ranks, others))
        used.append((torch.cuda.memory_allocated(), len(os.listdir("/proc/self/fd")), buffers))
    assert used[4] == used[199], used[::20]


DEAD_PEER = """
import functools, os, time, torch
print = functools.partial(print, flush=True)
from tests.common.symm_mem_cases import Case, Ranks
case = Case(tokens=(5, 3), budget=64)
ranks = Ranks(case, "cuda", timeout_s=1.0)
ids = case.expert_ids("cuda", case.generator("cuda"))
exchanges = ranks.exchanges(case, ids)
hidden = [torch.zeros(n, case.width, device="cuda", dtype=torch.bfloat16) for n in case.tokens]
probs = [torch.zeros(n, case.topk, device="cuda") for n in case.tokens]
phases = ranks.engines[0].dispatch_phases(exchanges[0], hidden[0], probs[0])
begin = time.monotonic()
try:
    for _ in phases:
        pass
    torch.cuda.synchronize()
    print("no error")
except Exception as error:
    print(f"device error after {time.monotonic() - begin:.2f} s: {str(error).splitlines()[0]}")
try:
    ranks.engines[0].raise_if_dead()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
os._exit(0)
"""


def test_dead_peer_ends_in_an_error_that_names_it():
    done = run_script(DEAD_PEER)
    print(done.stdout, done.stderr[-2000:])
    assert "device error" in done.stdout, done.stderr
    assert "RankFailure: rank 0 of the expert ranks: no message in time from rank 1 in dispatch" in done.stdout


def test_large_offsets_do_not_wrap():
    case = Case(tokens=(140_000, 3), experts=2, topk=2, width=8192, routing="one_rank")
    assert 2 * case.tokens[0] * case.width > 2**31
    assert run_case(case, "cuda") == []


def test_rows_are_stored_in_16_byte_words():
    from megatron.core.transformer.moe.dispatchers.hybridep import symm_mem_kernels as kernels

    assert run_case(large(width=1024), "cuda") == []
    report = {}
    for name in ("push_kernel", "expand_kernel", "reduce_kernel", "add_kernel"):
        caches = getattr(kernels, name).device_caches
        compiled = [kernel for cache in caches.values() for kernel in cache[0].values()]
        texts = [kernel.asm["ptx"] for kernel in compiled]
        words = ("ld.global.v4", "st.global.v4", "ld.global.b16", "st.global.b16")
        report[name] = [{word: text.count(word) for word in words} for text in texts[-2:]]
    print(report)
    for name, counts in report.items():
        assert any(c["st.global.v4"] for c in counts), f"{name}: {counts}"


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
@pytest.mark.parametrize("factor", [None, 4.0], ids=["exact", "budget"])
def test_layer_gives_the_same_bits_with_both_engines(factor, wire):
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    flex |= {"bf16": True, "params_dtype": torch.bfloat16, "moe_expert_rank_capacity_factor": factor}
    flex["moe_dispatch_fwd_dtype"] = wire
    mine, theirs = (
        run_layer(build_layer("cuda", **flex, moe_hybridep_engine=engine), "cuda", torch.bfloat16)
        for engine in ("symm_mem", "collective")
    )
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different, different


def test_engine_is_available_here():
    assert SymmMemEngine.why_unavailable(Ranks(large(), "cuda").engines[0].setup) is None
