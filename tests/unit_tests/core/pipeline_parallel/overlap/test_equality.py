"""The combined schedule gives the bits of the plain one: losses, gradients, weights, counters, whatever the layers are.

The cells of the normal tier cover every pair of choices; `full` runs every model in every pipeline, over more steps.
One run without overlap is enough for all ways to have it: neither a sharded optimizer nor recompute changes a bit.
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
FORMS = {
    "alltoall": {"is_grouped": True},
    "flex": {"dispatcher": "flex", "is_grouped": True},
    "one by one": {"is_grouped": False},
}
PIPES = {"PP1": {}, "PP2xVPP2": {"pp": 2, "vpp": 2}}
RECOMPUTE = {
    "all layers": ("uniform", "1"),
    "pairs of layers": ("uniform", "2"),
    "first layer": ("block", "1"),
    "parts": ("core_attn", "layernorm", "moe_act"),
}
# every way, and one kind of recompute in turn
SWEEP = [
    ((experts, mix, form, pipe), list(RECOMPUTE)[(i + j + k) % 4])
    for (i, experts), (j, mix), (k, form), pipe in itertools.product(
        enumerate(EXPERTS), enumerate(MIXES), enumerate(("alltoall", "flex")), PIPES
    )
]
# every value of one choice meets every value of each other choice, the pipelines in three more
PAIRWISE = [
    (experts, mix, list(WAYS)[(i + j) % 3], list(FORMS)[(i + 2 * j) % 3], "PP1")
    for (i, experts), (j, mix) in itertools.product(enumerate(EXPERTS), enumerate(MIXES))
] + [
    ("1 expert", "dense last", "delayed", "flex", "PP2xVPP2"),
    ("2 experts", "all moe", "delayed, reduced beside backward", "alltoall", "PP2xVPP2"),
    ("4 experts", "dense first, shared", "plain", "one by one", "PP2xVPP2"),
]


def run_all(pool, cell, ways, steps=STEPS, num_samples=6, fields=None, **changes):
    """Off, and on with each of some changes of the layout; `fields` are further fields of the model."""
    experts, mix, form, pipe = cell
    fields = {
        **(fields or {}),
        "num_moe_experts": EXPERTS[experts],
        "moe_flex_dispatcher_backend": "hybridep",
        **MIXES[mix],
    }
    if PIPES[pipe]:
        fields |= {"num_layers": 4, "moe_layer_freq": fields["moe_layer_freq"] * 2}
    case = make_case(**fields)
    layout = dataclasses.replace(EP2, **FORMS[form], **PIPES[pipe], **changes)
    weights = make_weights(case.config(Layout(dtype=layout.dtype)), case.shape, seed=3)
    batch = make_batch(num_samples)
    off = run_step(pool, case, layout, batch, weights, steps=steps)
    changed = [dataclasses.replace(layout, overlap=True, **way) for way in ways]
    return off, [run_step(pool, case, on, batch, weights, steps=steps) for on in changed]


def run_both(pool, cell, steps=STEPS, num_samples=6, fields=None, **changes):
    """Off and on, in one way."""
    experts, mix, way, form, pipe = cell
    off, (on,) = run_all(pool, (experts, mix, form, pipe), [WAYS[way]], steps, num_samples, fields, **changes)
    return off, on


def assert_same_bits(off, on):
    assert (off.loss, off.aux) == (on.loss, on.aux)
    for kind in ("grads", "params", "expert_bias", "tokens_per_expert"):
        expected, got = getattr(off, kind), getattr(on, kind)
        assert expected.keys() == got.keys()
        different = [name for name in expected if not torch.equal(expected[name], got[name])]
        assert not different, f"{kind} differ: {different}"


def check_counters(on, way, mix, pipe, steps):
    """On rank 0: pairs, exchanges of its layers, weight gradients put off."""
    num_microbatches, num_pairs = (3, 2) if pipe == "PP1" else (4, 3)
    num_layers = 2 if mix == "all moe" else 1
    if pipe != "PP1":
        num_layers = on.counters["stages on the comm stream"] // (4 * num_microbatches * steps)
        assert num_layers in (0, 1, 2)
    assert on.counters["pairs overlapped"] == num_pairs * steps
    assert on.counters["stages on the comm stream"] == 4 * num_microbatches * num_layers * steps
    assert (on.counters["wgrads deferred"] > 0) == ("delayed" in way)
    assert (on.counters["wgrads behind a send"] > 0) == ("delayed" in way and pipe != "PP1")


@pytest.mark.parametrize("cell", PAIRWISE, ids="-".join)
def test_overlap_changes_no_bit(pool, cell):
    _, mix, way, _, pipe = cell
    off, on = run_both(pool, cell, STEPS, 6 if pipe == "PP1" else 8)
    assert_same_bits(off, on)
    assert off.counters == {}
    check_counters(on, way, mix, pipe, STEPS)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("cell", "kind"), SWEEP, ids=str)
def test_overlap_changes_no_bit_over_many_steps(pool, cell, kind):
    _, mix, _, pipe = cell
    recomputed = {**WAYS["delayed"], "recompute": RECOMPUTE[kind]}
    off, ons = run_all(pool, cell, [*WAYS.values(), recomputed], 20, 6 if pipe == "PP1" else 8)
    *plain, last = ons
    for way, on in zip(WAYS, plain, strict=True):
        assert_same_bits(off, on)
        check_counters(on, way, mix, pipe, 20)
    assert_same_bits(off, last)
    assert last.counters["pairs overlapped"] == plain[0].counters["pairs overlapped"]
    assert (last.counters["stages recomputed"] > 0) == (kind != "parts")


FP8 = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 2},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "rowwise": {"fp8": "e4m3", "fp8_recipe": "rowwise", "fp8_wgrad": False},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


@pytest.mark.parametrize(
    ("recipe", "cell"),
    [
        ("delayed", ("2 experts", "all moe", "delayed", "flex", "PP1")),
        ("delayed", ("2 experts", "dense last", "delayed, reduced beside backward", "alltoall", "PP2xVPP2")),
        ("tensorwise", ("1 expert", "dense first, shared", "delayed", "alltoall", "PP1")),
        ("rowwise", ("4 experts", "all moe", "plain", "flex", "PP1")),
        ("blockwise", ("2 experts", "all moe", "delayed", "flex", "PP1")),
    ],
    ids=str,
)
def test_overlap_changes_no_bit_in_fp8(pool, recipe, cell):
    num_microbatches = 3 if cell[-1] == "PP1" else 4
    off, on = run_both(pool, cell, STEPS, 2 * num_microbatches, dtype=torch.bfloat16, fields=FP8[recipe])
    assert_same_bits(off, on)
    assert on.counters["pairs overlapped"] > 0


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_any_number_of_microbatches(pool, num_microbatches):
    off, on = run_both(pool, PAIRWISE[0], steps=1, num_samples=2 * num_microbatches)
    assert_same_bits(off, on)
    assert on.counters["pairs overlapped"] == num_microbatches - 1


PARTS = {"all moe": (), "dense last": ("mlp",), "dense first, shared": ("mlp", "shared_experts")}
"""More of them, where the model has them."""
RECOMPUTED = list(itertools.product(MIXES, ("alltoall", "flex"), PIPES))


def check_recomputed(pool, cell, kinds, steps):
    """With dropout, so that the second pass has to draw the numbers of the first."""
    fields = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_aux_loss_coeff": 0.01}
    words = {**RECOMPUTE, "parts": (*RECOMPUTE["parts"], *PARTS[cell[0]])}
    ways = [{**WAYS["delayed, reduced beside backward"], "recompute": words[kind]} for kind in kinds]
    off, ons = run_all(pool, ("2 experts", *cell), ways, steps, 8, fields)
    assert off.aux
    for kind, on in zip(kinds, ons, strict=True):
        assert_same_bits(off, on)
        assert (on.counters["stages recomputed"] > 0) == (kind != "parts")


@pytest.mark.parametrize(
    ("kind", "cell"),
    [("all layers", ("dense last", "alltoall", "PP1")), ("first layer", ("dense first, shared", "flex", "PP1"))],
    ids=str,
)
def test_recompute_beside_overlap_changes_no_bit(pool, kind, cell):
    check_recomputed(pool, cell, [kind], steps=2)


@pytest.mark.full
@pytest.mark.parametrize("cell", RECOMPUTED, ids="-".join)
def test_recompute_beside_overlap_changes_no_bit_in_any_mix(pool, cell):
    check_recomputed(pool, cell, list(RECOMPUTE), steps=3)
