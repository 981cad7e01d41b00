"""Every configuration that trains does so without a finding."""

import itertools

import pytest

from tests.common.stream_runs import TINY_MOE, checked_run
from tests.unit_tests.core.stream_check.cases import (
    CHUNKS,
    DELAYED,
    HYBRIDEP,
    ONE_EXPERT,
    OVERLAP,
    PIPELINE,
    SHARED,
    ZERO,
)

SCHEDULES = {"plain": TINY_MOE, "overlap": OVERLAP, "delayed": DELAYED}
EXPERTS = {"two experts": (), "one expert": ONE_EXPERT, "hybridep": HYBRIDEP}
LAYERS = {"dense first": (), "dense last": ("--moe-layer-freq", "[1,1,0]"), "all MoE": ("--moe-layer-freq", "1")}
REST = {
    "plain DP": (),
    "ZeRO": ZERO,
    "early release, ZeRO": (*ZERO, "--ep-overlap-early-attn-memory-release"),
    "per-token loss": ("--calculate-per-token-loss",),
    "shared expert": SHARED,
    "aux loss": ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01"),
}


def grid():
    """Every pair of choices of different axes at least once: Latin squares, the last axis shifted along."""
    axes = [list(axis.values()) for axis in (SCHEDULES, EXPERTS, LAYERS, REST)]
    for (i, schedule), (j, experts), (k, rest) in itertools.product(*map(enumerate, (axes[0], axes[1], axes[3]))):
        if (i + j) % 3 == k % 3:
            needs_overlap = "--ep-overlap-early-attn-memory-release" in rest
            yield (*(OVERLAP if needs_overlap and i == 0 else schedule), *experts, *axes[2][(i + 2 * j + k) % 3], *rest)


@pytest.mark.full
@pytest.mark.parametrize("flags", list(grid()), ids=lambda flags: " ".join(flags[len(TINY_MOE) :]) or "plain")
def test_run_is_silent(pool, flags):
    assert checked_run(pool, flags) == ""


PIPELINES = {
    "1F1B": (PIPELINE, 2),
    "interleaved": ((*PIPELINE, *CHUNKS), 2),
    "interleaved, expert parallel, ZeRO": ((*PIPELINE, "--expert-model-parallel-size", "2", *CHUNKS, *ZERO), 4),
    "messages at once": ((*PIPELINE, *CHUNKS, "--no-overlap-p2p-communication"), 2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_is_silent(pool, name):
    flags, world_size = PIPELINES[name]
    assert checked_run(pool, (*TINY_MOE, *flags), world_size) == ""


def test_overlap_with_delayed_weight_gradients_and_zero_is_silent(pool):
    assert checked_run(pool, (*DELAYED, *ZERO)) == ""
