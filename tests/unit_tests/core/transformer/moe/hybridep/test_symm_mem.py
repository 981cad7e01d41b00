"""The symm_mem engine between ranks in one process, its kernels interpreted; GPU tests run such cases natively."""

import unittest.mock
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import ConfigError, RankFailure
from megatron.core.fp8.wire import pack_rows, unpack_rows
from megatron.core.transformer.moe.dispatchers.hybridep import symm_mem_buffers, symm_mem_routing
from megatron.core.transformer.moe.dispatchers.hybridep.collective import CollectiveEngine
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem import SymmMemEngine
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_buffers import Capacity, Sections
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_group import LocalSymmetricGroup
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_launch import Launch, Tiling
from tests.common.exchange_definition import LocalExchange
from tests.common.symm_mem_cases import (
    INTERPRETED_CASES,
    MORE_INTERPRETED_CASES,
    SMALL,
    Ranks,
    run_case,
    run_staggered,
)

IDS = torch.tensor([[0, 2], [2, -1], [0, 3], [-1, -1], [2, 3]], dtype=torch.int32)


@pytest.mark.parametrize("case", INTERPRETED_CASES, ids=lambda case: case.name)
def test_exchange_equals_its_definition_bit_for_bit(interpreted, case):
    assert interpreted(run_case, case, "cpu") == []


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_INTERPRETED_CASES, ids=lambda case: case.name)
def test_exchange_equals_its_definition_in_more_cases(interpreted, case):
    assert interpreted(run_case, case, "cpu") == []


STAGGERED = replace(SMALL, tokens=(2, 1, 2), experts=1, topk=2, dtype="fp32", width=8, budget=8)


def staggered_job(num_buffers):
    """Four messages, with two buffers in turn or with one for all."""
    ranks = Ranks(STAGGERED, "cpu")
    for engine in ranks.engines:
        engine._mail.reserve(Capacity(2, 2, 32))
        if num_buffers == 1:
            engine._mail.sections = replace(engine._mail.sections, num_bytes=0)
    return run_staggered(STAGGERED, 2, 0, ranks)


def test_ranks_may_be_one_message_ahead(interpreted):
    assert interpreted(staggered_job, 2) == []


def test_one_buffer_would_not_do(interpreted):
    assert interpreted(staggered_job, 1) != []


def collective_job(case):
    """The collective engine on the same input: what this rank gets."""
    rank, generator = dist.get_rank(), case.generator("cpu")
    ids = case.expert_ids("cpu", generator)
    hidden = case.normal(list(case.tokens), "cpu", generator)
    probs = [torch.rand(x.shape, generator=generator) for x in ids]
    engine = CollectiveEngine(EngineSetup(dist.group.WORLD, case.experts, case.width, case.multiple))
    exchange = Exchange(expert_ids=ids[rank], max_tokens=max(case.tokens), row_budget=case.budget)
    engine.prepare(exchange)
    dispatch = engine.dispatch_packed if case.is_packed else engine.dispatch
    rows, row_probs = dispatch(exchange, hidden[rank], probs[rank])
    return (rows, row_probs), engine.combine(exchange, rows, row_probs), exchange.tokens_per_expert


@pytest.mark.parametrize("case", [SMALL, *INTERPRETED_CASES[-3:]], ids=lambda case: case.name)
def test_definition_is_that_of_the_collective_engine(pool, case):
    generator = case.generator("cpu")
    ids = case.expert_ids("cpu", generator)
    hidden = case.normal(list(case.tokens), "cpu", generator)
    probs = [torch.rand(x.shape, generator=generator) for x in ids]
    reference = LocalExchange(ids, case.experts, case.multiple, case.budget)
    arriving = [unpack_rows(pack_rows(one), case.width) for one in hidden] if case.is_packed else hidden
    sent = reference.dispatch(arriving, probs)
    returned = reference.combine(*map(list, zip(*sent, strict=True)))
    for rank, (rows, sums, counts) in enumerate(pool.run(collective_job, case, world_size=len(ids))):
        end = sum(reference.tokens_per_expert[rank])
        assert counts.tolist() == reference.tokens_per_expert[rank]
        assert all(torch.equal(a[:end], b[:end]) for a, b in zip(rows, sent[rank], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(sums, returned[rank], strict=True))


def grow_job():
    case = replace(SMALL, tokens=(1, 1), experts=1, topk=1)
    ranks = Ranks(case, "cpu")
    capacities, found = [], []
    with unittest.mock.patch.object(symm_mem_buffers, "TOKEN_MULTIPLE", 2):
        for tokens in ((1, 1), (3, 1), (1, 1)):
            found += run_case(replace(case, tokens=tokens), "cpu", ranks)
            capacities.append([engine._mail.capacity.tokens for engine in ranks.engines])
    return capacities, found


def test_sections_grow_on_all_ranks_when_one_brings_more_tokens(interpreted):
    capacities, found = interpreted(grow_job)
    assert found == []
    assert capacities == [[2, 2], [4, 4], [4, 4]]


def lone_rank_job(num_polls):
    """Rank 1 says nothing in the second exchange."""
    case = replace(SMALL, tokens=(2, 2), experts=1, topk=1)
    ranks = Ranks(case, "cpu", timeout_s=num_polls / 1e6)
    found = run_case(case, "cpu", ranks)
    ids = [torch.zeros(2, 1, dtype=torch.int32) for _ in range(2)]
    exchanges = ranks.exchanges(case, ids)
    phases = ranks.engines[0].combine_phases(exchanges[0], torch.zeros(4, 16), None)
    exchanges[0].saved.slot_rows = torch.full((2, 2, 1), -1, dtype=torch.int32)
    try:
        list(phases)
    except RankFailure as error:
        return found, str(error)
    return found, "no failure"


def test_silent_peer_is_named_after_the_time_limit(interpreted):
    found, text = interpreted(lone_rank_job, 20)
    assert found == []
    assert text == "rank 0 of the expert ranks: no message in time from rank 1 in combine."


def wrap_job():
    """The 32-bit counters of reports pass their end."""
    case = replace(SMALL, tokens=(1, 1), experts=1, topk=1)
    ranks = Ranks(case, "cpu")
    for engine in ranks.engines:
        signals = engine._mail.signals
        signals.expected.fill_(2**31 - 3)
        engine._mail.control[: signals.num_words].fill_(2**31 - 3)
        signals.epoch.fill_(2**31 - 2)
    return run_case(case, "cpu", ranks), [engine._mail.signals.epoch.item() for engine in ranks.engines]


def test_counters_may_wrap_around(interpreted):
    found, epochs = interpreted(wrap_job)
    assert found == []
    assert epochs == [-(2**31) + 3] * 2  # the four operations of a case, and the dispatch that was repeated


def number_job(ids, num_experts):
    """In blocks of two tokens, and counts of two blocks at a time."""
    with unittest.mock.patch.multiple(symm_mem_routing, BLOCK_ELEMENTS=8, PREFIX_CHUNK=2):
        return symm_mem_routing.number_rows(ids, num_experts)


def test_rows_are_numbered_by_token_across_blocks(interpreted):
    counts, places = interpreted(number_job, IDS, 4)
    assert counts.tolist() == [2, 0, 3, 2]
    used = IDS >= 0
    assert places[used].tolist() == [0, 0, 1, 1, 0, 2, 1]


def refusal_job(dtype, probs_dtype):
    engine = SymmMemEngine(EngineSetup(LocalSymmetricGroup(1).ranks[0], 2, 16))
    exchange = Exchange(expert_ids=torch.zeros(3, 1, dtype=torch.int32))
    engine.prepare(exchange)
    try:
        engine.dispatch(exchange, torch.zeros(3, 16, dtype=dtype), torch.zeros(3, 1, dtype=probs_dtype))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_dtypes_that_do_not_travel_are_refused(interpreted, dtypes):
    text = interpreted(refusal_job, *dtypes)
    assert f"rows of {dtypes[0]} with probabilities of {dtypes[1]}" in text
    assert "--moe-hybridep-engine" in text


def test_narrow_rows_and_missing_gpus_are_named():
    reason = SymmMemEngine.why_unavailable(EngineSetup(None, 2, 20))
    assert reason == "hidden_size=20: rows must be a multiple of 8 elements"
    if not torch.cuda.is_available():
        assert SymmMemEngine.why_unavailable(EngineSetup(None, 2, 16)) == "there is no GPU"


def test_sections_do_not_overlap_beyond_32_bits():
    sections = Sections.of(Capacity(tokens=65536, slots=8, row_bytes=16384), num_ranks=8)
    per_slot = 8 * 65536 * 8 * 4
    assert (sections.ids_at, sections.places_at, sections.probs_at, sections.rows_at) == tuple(
        per_slot * i for i in range(4)
    )
    assert sections.num_bytes == 3 * per_slot + 8 * 65536 * 16384 > 2**32


def test_blocks_fill_the_given_multiprocessors():
    chosen = Launch.of(24, 2048)
    assert [tiling.blocks for tiling in chosen.tilings()] == [24, 192, 192, 192]
    assert all(tiling.blocks_per_sm * tiling.warps * 32 <= 2048 for tiling in chosen.tilings())
    assert chosen.push.tokens == Launch.of(None, 2048).push.tokens == 8


@pytest.mark.parametrize(("hidden_size", "blocks", "warps"), [(2048, 1056, 4), (4096, 1056, 8), (7168, 528, 8)])
def test_sums_are_cut_by_the_width_of_rows(hidden_size, blocks, warps):
    chosen = Launch.of(None, hidden_size).reduce
    assert (chosen.blocks, chosen.warps) == (blocks, warps)
    assert Launch.of(10, hidden_size).reduce.blocks == 10 * blocks // 132


@pytest.mark.parametrize(("hidden_size", "warps"), [(8, 1), (512, 2), (1024, 4), (2048, 8), (7168, 8)])
def test_each_thread_has_16_bytes(hidden_size, warps):
    assert Tiling(1).num_warps(hidden_size) == warps


def test_capacity_covers_both_and_is_rounded_up():
    assert Capacity(0, 2, 32).joined(Capacity(65, 1, 64)) == Capacity(128, 2, 64)
    assert Capacity(128, 2, 64).joined(Capacity(100, 1, 32)) == Capacity(128, 2, 64)
