"""Kernels that order rows by expert, on a GPU: the bits of the plain form at all sizes, and bandwidth beside a copy."""

import dataclasses
import statistics

import pytest
import torch

from megatron.core.fusions.fused_permute import (
    _picked,
    kernel_gather,
    kernel_spread,
    kernel_sum,
    permute_rows,
    unpermute_rows,
)
from megatron.core.fusions.fused_row_layout import (
    TAIL,
    Sizes,
    kernel_layout,
    kernel_slots,
    reference_layout,
    reference_slots,
    row_layout,
)
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup, shared_engine
from tests.common.dispatch_cases import DispatchCase, assert_same, expected_ranks, lossless_budget, run_engine
from tools.benchmark.timing import time_replays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
TOKENS = (0, 1, 3, 63, 64, 65, 4095, 16384)
SHARE_OF_COPY = 0.85


def random_ids(num_tokens, num_slots, num_experts, seed=0):
    """Distinct ascending experts of each token; a tenth of the slots is empty."""
    generator = torch.Generator("cuda").manual_seed(seed)
    likes = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    ids = likes.topk(num_slots, dim=1).indices
    ids[torch.rand(ids.shape, device="cuda", generator=generator) < 0.1] = num_experts
    ids = ids.sort(dim=1).values
    return ids.masked_fill(ids == num_experts, -1).int()


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def plain_gather(tokens, probs, layout):
    """The plain form on the GPU."""
    is_tail = layout.pairs == TAIL
    rows = _picked(tokens, layout.pairs.div(layout.slots_per_token, rounding_mode="floor"), is_tail)
    return rows, _picked(probs.reshape(-1), layout.pairs, is_tail)


def plain_sum(rows, slots, dtype):
    total = torch.zeros(len(slots), rows.shape[1], device="cuda", dtype=torch.promote_types(rows.dtype, torch.float32))
    for slot in slots.unbind(1):
        picked = rows.index_select(0, slot.clamp(min=0)) if len(rows) else torch.zeros_like(total, dtype=rows.dtype)
        total += picked.masked_fill(slot.unsqueeze(1) < 0, 0)
    return total.to(dtype)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("num_slots", "num_experts"), [(1, 1), (2, 8), (8, 64), (8, 256), (4, 1000)], ids=str)
def test_layout_is_the_plain_form(num_tokens, num_slots, num_experts):
    ids = random_ids(num_tokens, num_slots, num_experts)
    for multiple, num_rows in ((1, num_tokens * num_slots), (16, num_tokens * num_slots + 16 * num_experts), (1, 100)):
        sizes = Sizes(num_rows, multiple)
        kernel, plain = kernel_layout(ids, num_experts, sizes, True), reference_layout(ids, num_experts, sizes, True)
        for name in ("slots", "pairs", "tokens_per_expert", "dropped_rows"):
            assert torch.equal(getattr(kernel, name), getattr(plain, name)), (name, multiple, num_rows)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("num_slots", "num_experts"), [(1, 1), (2, 8), (8, 128), (256, 256)], ids=str)
def test_slots_are_the_plain_form(num_tokens, num_slots, num_experts):
    ids = random_ids(num_tokens, num_slots, num_experts).long()
    chosen = torch.zeros(num_tokens, num_experts + 1, dtype=torch.bool, device="cuda")
    chosen = chosen.scatter_(1, ids.where(ids >= 0, num_experts), True)[:, :num_experts]
    assert torch.equal(kernel_slots(chosen, num_slots), reference_slots(chosen, num_slots))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [128, 130, 2048, 7168])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 65, 4095])
def test_gather_and_sum_are_the_plain_forms_bit_for_bit(num_tokens, width, dtype):
    layout = row_layout(random_ids(num_tokens, 8, 32), 32, num_tokens * 8 + 32 * 16, 16, has_tail=True)
    tokens, probs = normal(num_tokens, width, dtype=dtype), normal(num_tokens, 8, dtype=torch.float32, seed=1)
    rows, row_probs = kernel_gather(tokens, probs, layout.pairs, 8)
    used = int(layout.tokens_per_expert.sum())
    expected, expected_probs = plain_gather(tokens, probs, layout)
    assert torch.equal(rows[:used], expected[:used])
    assert torch.equal(row_probs[:used], expected_probs[:used])
    rows[layout.pairs < 0] = float("nan")
    summed, back = kernel_sum(rows, row_probs, layout.slots, dtype)
    assert torch.equal(summed, plain_sum(rows, layout.slots, dtype))
    assert torch.equal(back, probs.masked_fill(layout.slots < 0, 0))


def test_strided_and_expanded_tokens_are_read_as_they_are():
    layout = row_layout(random_ids(65, 4, 8), 8, 65 * 4, has_tail=True)
    wide, used = normal(65, 260), int(layout.tokens_per_expert.sum())
    for tokens in (wide[:, ::2], wide[:, :128], wide[:1].expand(65, -1), wide[:, :1].expand(-1, 128)):
        rows, _ = kernel_gather(tokens, None, layout.pairs, 4)
        expected, _ = kernel_gather(tokens.contiguous(), None, layout.pairs, 4)
        assert torch.equal(rows[:used], expected[:used])


def test_offsets_beyond_32_bits_reach_the_last_row():
    num_rows = (1 << 31) // 4096 + 3
    tokens = torch.zeros(num_rows, 4096, dtype=torch.uint8, device="cuda")
    tokens[-1], tokens[0] = 7, 3
    rows, _ = kernel_gather(tokens, None, torch.arange(num_rows - 1, -1, -1, device="cuda", dtype=torch.int32), 1)
    assert torch.equal(rows[0], tokens[-1])
    assert torch.equal(rows[-1], tokens[0])


def test_a_step_reads_nothing_on_the_host():
    ids, tokens = random_ids(4096, 8, 64), normal(4096, 2048).requires_grad_()
    probs = normal(4096, 8, dtype=torch.float32).requires_grad_()

    def step():
        layout = row_layout(ids, 64, 40_000, 16, has_tail=True)
        rows, _ = permute_rows(tokens, probs, layout)
        unpermute_rows(rows, layout, torch.bfloat16).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, _ = permute_rows(tokens, probs, row_layout(ids, 64, 40_000, 16, has_tail=True))
    ids.copy_(random_ids(4096, 8, 64, seed=5))
    graph.replay()
    layout = row_layout(ids, 64, 40_000, 16, has_tail=True)
    used = int(layout.tokens_per_expert.sum())
    assert torch.equal(rows[:used], permute_rows(tokens, probs, layout)[0][:used])


@pytest.mark.parametrize(
    "case",
    [
        DispatchCase((65,), num_local_experts=64, num_slots=8, width=128, dtype=torch.bfloat16, multiple=16),
        DispatchCase((3,), num_local_experts=4, num_slots=4, width=7168, dtype=torch.bfloat16),
        DispatchCase((64,), num_local_experts=8, num_slots=3, is_strided=True),
        DispatchCase((0,)),
    ],
    ids=str,
)
def test_collective_engine_is_the_loop_bit_for_bit(case):
    engine = shared_engine(
        "hybridep", "collective", EngineSetup(None, case.num_local_experts, case.width, case.multiple)
    )
    for budget in (None, lossless_budget(case)):
        sized = dataclasses.replace(case, budget=budget)
        assert_same(run_engine(engine, sized, 0, "cuda"), expected_ranks(sized)[0], str(sized))


def microseconds(function):
    """Median time of a call on the device: calls are replayed in a graph, so that no launch is waited for."""
    return statistics.median(time_replays({"": function}, num_calls=10, repeats=9)[""])


@pytest.mark.parametrize(
    ("num_tokens", "width", "num_experts", "num_slots"),
    [(4096, 4096, 8, 2), (4096, 7168, 128, 8), (16384, 2048, 64, 8)],
)
def test_bandwidth_is_near_that_of_a_copy(num_tokens, width, num_experts, num_slots):
    generator = torch.Generator("cuda").manual_seed(0)
    likes = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    ids = likes.topk(num_slots, dim=1).indices.sort(dim=1).values.int()
    layout = row_layout(ids, num_experts, num_tokens * num_slots)
    tokens = normal(num_tokens, width)
    rows, _ = kernel_spread(tokens, None, layout)
    target, summed = torch.empty_like(rows), torch.empty_like(tokens)
    copy_us = microseconds(lambda: target.copy_(rows))
    copy_rate = 2 * rows.nbytes / copy_us
    shares = {}
    for name, call, moved in (
        # each row is written once, a token is read at least once; a sum reads all rows and writes the tokens
        ("permute", lambda: kernel_spread(tokens, None, layout), rows.nbytes + tokens.nbytes),
        ("unpermute", lambda: kernel_sum(rows, None, layout.slots, torch.bfloat16), rows.nbytes + summed.nbytes),
    ):
        time_us = microseconds(call)
        shares[name] = moved / time_us / copy_rate
        print(
            f"{name} {num_tokens}x{width} top-{num_slots} of {num_experts}: {time_us:.1f} us, "
            f"{moved / time_us / 1e3:.0f} GB/s, {shares[name]:.2f} of a copy ({copy_rate / 1e3:.0f} GB/s)"
        )
    layout_us = microseconds(lambda: row_layout(ids, num_experts, num_tokens * num_slots))
    print(f"layout: {layout_us:.1f} us")
    assert min(shares.values()) >= SHARE_OF_COPY, shares
