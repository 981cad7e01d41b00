"""The combined schedule keeps the bits of the plain one with TP, ETP, CP, losses per token and FP8."""

import dataclasses
import itertools

import pytest
import torch

from tests.common.layouts import Layout, run_step
from tests.common.reference import make_weights
from tests.common.reference_model import GptShape
from tests.unit_tests.core.pipeline_parallel.overlap.test_equality import assert_same_bits
from tests.unit_tests.layouts.cases import make_case, masked_batch

SHAPE = GptShape(vocab_size=16, max_sequence_length=8)
TP2 = Layout(tp=2, dp=1, is_sequence_parallel=True, dtype=torch.float32, is_grouped=True)
LAYOUTS = {
    "TP2 SP, EP2": dataclasses.replace(TP2, ep=2, etp=1),
    "TP2 SP, ETP2, EP2": dataclasses.replace(TP2, dp=2, ep=2, etp=2),
    "CP2 p2p": Layout(cp=2, ep=2, dtype=torch.float32, is_grouped=True),
    "CP2 all_gather": Layout(cp=2, ep=2, cp_comm_type="all_gather", dtype=torch.float32, is_grouped=True),
    "CP2 TP2 SP, EP4": dataclasses.replace(TP2, cp=2, ep=4, etp=1),
    "PP2 VPP2, TP2 SP, EP2": dataclasses.replace(TP2, pp=2, vpp=2, ep=2, etp=1),
    "PP2 VPP2, CP2, EP2": dataclasses.replace(Layout(cp=2, ep=2, dtype=torch.float32, is_grouped=True), pp=2, vpp=2),
}
ALL = list(itertools.product(LAYOUTS, ("alltoall", "flex"), (False, True), (False, True)))
FEW = [
    ("TP2 SP, EP2", "flex", True, True),
    ("CP2 p2p", "alltoall", True, False),
]


def run_both(pool, layout, batch, steps, **fields):
    """Off and on."""
    num_layers = 2 * layout.pp
    case = make_case(SHAPE, num_layers=num_layers, moe_layer_freq=[1] * num_layers, **fields)
    weights = make_weights(case.config(Layout(dtype=layout.dtype)), case.shape, seed=3)
    off = run_step(pool, case, dataclasses.replace(layout, delays_wgrad=False), batch, weights, steps=steps)
    on = run_step(pool, case, dataclasses.replace(layout, overlap=True), batch, weights, steps=steps)
    assert_same_bits(off, on)
    # one stage: all but one; first of two stages: 8 forwards of 4 microbatches, less 5 of the warm-up
    assert on.counters["pairs overlapped"] == (len(batch.tokens) // layout.dp - 1) * steps
    assert (on.counters["wgrads deferred"] > 0) == layout.delays_wgrad


def check_layout(pool, cell, steps):
    """Losses of tokens are masked unevenly, so that weights per token differ from weights per microbatch."""
    name, dispatcher, is_delayed, is_per_token = cell
    layout = dataclasses.replace(LAYOUTS[name], dispatcher=dispatcher, delays_wgrad=is_delayed)
    num_samples = (3 if layout.pp == 1 else 4) * layout.dp
    batch = masked_batch([8, 3, 5, 1, 8, 6][:num_samples], num_samples, seq_length=8)
    run_both(pool, layout, batch, steps, num_query_groups=2, calculate_per_token_loss=is_per_token)


@pytest.mark.parametrize("cell", FEW, ids=str)
def test_sharded_layouts_change_no_bit(pool, cell):
    check_layout(pool, cell, steps=1)


@pytest.mark.full
@pytest.mark.parametrize("cell", ALL, ids=str)
def test_every_sharded_layout_changes_no_bit(pool, cell):
    check_layout(pool, cell, steps=3)


def check_fp8(pool, recipe, dispatcher, num_experts, is_delayed, steps):
    layout = Layout(dp=2, ep=2, dtype=torch.bfloat16, is_grouped=True, dispatcher=dispatcher, delays_wgrad=is_delayed)
    batch = masked_batch([8] * 6, 6, seq_length=8)
    sizes = {"hidden_size": 32, "ffn_hidden_size": 32, "moe_ffn_hidden_size": 16}
    run_both(pool, layout, batch, steps, num_moe_experts=num_experts, fp8="hybrid", fp8_recipe=recipe, **sizes)


def test_fp8_with_one_expert_changes_no_bit(pool):
    check_fp8(pool, "delayed", "alltoall", 2, is_delayed=True, steps=2)


@pytest.mark.full
@pytest.mark.parametrize("is_delayed", [False, True], ids=["plain", "delayed"])
@pytest.mark.parametrize("num_experts", [2, 4])
@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_fp8_changes_no_bit(pool, recipe, dispatcher, num_experts, is_delayed):
    check_fp8(pool, recipe, dispatcher, num_experts, is_delayed, steps=3)
