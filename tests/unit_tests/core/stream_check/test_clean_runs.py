"""Every configuration that trains does so without a finding."""

import itertools

import pytest

from tests.common.stream_runs import TINY_MOE, checked_run
from tests.unit_tests.core.stream_check.cases import (
    CHUNKS,
    DELAYED,
    EP2,
    FP8,
    HYBRIDEP,
    ONE_EXPERT,
    OVERLAP,
    PIPELINE,
    PIPELINE_OVERLAP,
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


TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
LAYOUTS = {
    "recompute, selective": ((*DELAYED, *SELECTIVE, "core_attn", "moe_act", "layernorm"), 2),
    "recompute, full": ((*DELAYED, *FULL), 2),
    "FP8": ((*DELAYED, *HYBRIDEP, *FP8), 2),
    "FP8, first and last layers in bf16": ((*DELAYED, *HYBRIDEP, *FP8, "--first-last-layers-bf16"), 2),
    "row budget": ((*DELAYED, *HYBRIDEP, "--moe-expert-rank-capacity-factor", "1.5"), 2),
    "context parallel": ((*DELAYED, "--context-parallel-size", "2"), 2),
    "context parallel, all-gather": ((*DELAYED, "--context-parallel-size", "2", "--cp-comm-type", "all_gather"), 2),
    "allgather with overlap": ((*DELAYED, "--moe-token-dispatcher-type", "allgather"), 2),
    "tensor and sequence parallel": ((*DELAYED, *TP2), 2),
    "allgather": ((*TINY_MOE, "--moe-token-dispatcher-type", "allgather"), 2),
    "buckets that share a buffer": ((*DELAYED, *ZERO, "--ddp-bucket-size", "500"), 2),
    "1F1B": ((*TINY_MOE, *PIPELINE), 2),
    "interleaved": ((*TINY_MOE, *PIPELINE, *CHUNKS), 2),
    "interleaved, messages at once": ((*TINY_MOE, *PIPELINE, *CHUNKS, "--no-overlap-p2p-communication"), 2),
    "interleaved, expert parallel, ZeRO": ((*TINY_MOE, *PIPELINE, *EP2, *CHUNKS, *ZERO), 4),
    "chunks without layers": ((*DELAYED, *PIPELINE, *EP2, *ZERO, "--pipeline-model-parallel-layout", "E|t|ttt|L"), 4),
    "pipeline with overlap": (PIPELINE_OVERLAP, 4),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_silent(pool, name):
    flags, world_size = LAYOUTS[name]
    assert checked_run(pool, flags, world_size) == ""


def test_overlap_with_delayed_weight_gradients_and_zero_is_silent(pool):
    assert checked_run(pool, (*DELAYED, *ZERO)) == ""
