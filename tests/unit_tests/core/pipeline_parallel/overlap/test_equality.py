"""The combined schedule gives the bits of the plain one: losses, gradients, weights, counters, whatever the layers are.

The cells of the normal tier cover every pair of choices; `full` runs all of them, over more steps.
"""

import dataclasses
import itertools

import pytest
import torch

from tests.common.layouts import Layout, run_step
from tests.common.reference import make_weights
from tests.unit_tests.layouts.cases import make_batch, make_case

EP2 = Layout(dp=2, ep=2, dtype=torch.float32)
STEPS = 3

EXPERTS = {"1 expert": 2, "2 experts": 4, "4 experts": 8}
MIXES = {
    "all moe": {"moe_layer_freq": [1, 1]},
    "dense last": {"moe_layer_freq": [1, 0]},
    "dense first, shared": {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 4},
}
WAYS = {
    "plain": {},
    "delayed": {"delays_wgrad": True},
    "delayed, reduced beside backward": {
        "delays_wgrad": True,
        "overlap_grad_reduce": True,
        "bucket_size": 40,
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
    },
}
FORMS = {"grouped": True, "sequential": False}
ALL = list(itertools.product(EXPERTS, MIXES, WAYS, FORMS))
# every value of one choice meets every value of each other choice
PAIRWISE = [
    (experts, mix, list(WAYS)[(i + j) % 3], list(FORMS)[(i + j // 2) % 2])
    for (i, experts), (j, mix) in itertools.product(enumerate(EXPERTS), enumerate(MIXES))
]


def run_both(pool, cell, steps=STEPS, num_samples=6, **changes):
    """Off and on; `changes` are further fields of the layout."""
    experts, mix, way, form = cell
    case = make_case(num_moe_experts=EXPERTS[experts], moe_router_topk=2, **MIXES[mix])
    layout = dataclasses.replace(EP2, is_grouped=FORMS[form], **WAYS[way], **changes)
    weights = make_weights(case.config(Layout()), case.shape, seed=3)
    batch = make_batch(num_samples)
    off = run_step(pool, case, dataclasses.replace(layout, delays_wgrad=False), batch, weights, steps=steps)
    on = run_step(pool, case, dataclasses.replace(layout, overlap=True), batch, weights, steps=steps)
    return off, on


def assert_same_bits(off, on):
    assert (off.loss, off.aux) == (on.loss, on.aux)
    for kind in ("grads", "params", "expert_bias", "tokens_per_expert"):
        expected, got = getattr(off, kind), getattr(on, kind)
        assert expected.keys() == got.keys()
        different = [name for name in expected if not torch.equal(expected[name], got[name])]
        assert not different, f"{kind} differ: {different}"


def check_cell(pool, cell, steps):
    off, on = run_both(pool, cell, steps)
    assert_same_bits(off, on)
    assert off.counters == {}
    assert on.counters["pairs overlapped"] == 2 * steps  # 3 microbatches
    assert on.counters["stages on the comm stream"] == 2 * 2 * 3 * steps * (2 if cell[1] == "all moe" else 1)
    assert (on.counters["wgrads deferred"] > 0) == ("delayed" in cell[2])


@pytest.mark.parametrize("cell", PAIRWISE, ids="-".join)
def test_overlap_changes_no_bit(pool, cell):
    check_cell(pool, cell, STEPS)


@pytest.mark.full
@pytest.mark.parametrize("cell", ALL, ids="-".join)
def test_overlap_changes_no_bit_over_many_steps(pool, cell):
    check_cell(pool, cell, steps=20)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_any_number_of_microbatches(pool, num_microbatches):
    off, on = run_both(pool, ALL[0], steps=1, num_samples=2 * num_microbatches)
    assert_same_bits(off, on)
    assert on.counters["pairs overlapped"] == num_microbatches - 1
