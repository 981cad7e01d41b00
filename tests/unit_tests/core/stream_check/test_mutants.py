"""Each fault of streams and lifetimes, put back in, is reported on the CPU; the same run without it is silent."""

import pytest

from tests.common.stream_runs import TINY_MOE, checked_run
from tests.unit_tests.core.stream_check.cases import (
    DELAYED,
    FP8,
    HYBRIDEP,
    ONE_EXPERT,
    OVERLAP,
    PIPELINE,
    PIPELINE_OVERLAP,
    SHARED,
    ZERO,
)

FAULTS = {
    "f1_wgrad_on_ambient_stream": (
        DELAYED,
        "weight gradient outside its stage's stream",
        "put off on compute in B 0.0 layer 2 experts",
        "taken up on comm",
        "run it on compute",
    ),
    "f2_shadowed_rows_kept": (
        (*DELAYED, *ONE_EXPERT),
        "kept after its last use: tensor bfloat16 [16, 16] of aten.new_empty",
        "on compute in F 0.0 layer 2 experts",
        "hold on compute in W 0.0 layer 2 experts",
        "do not keep it for backward: nothing saved it",
    ),
    "f2_rows_kept": (
        (*DELAYED, *HYBRIDEP, *FP8),
        "kept after its last use: tensor bfloat16",
        "hold on compute in W 0.0 layer 2 experts",
    ),
    "f3_counts_freed_early": (
        (*DELAYED, *HYBRIDEP),
        "before its last use: tensor int64 [2] of",
        "then   free on comm",
        "first  aten.sum on compute in W 0.2 layer 1 experts",
    ),
    "f4_saved_rows_released": (
        (*DELAYED, *ONE_EXPERT),
        "used after its release: tensor bfloat16 [16, 16] of aten.new_empty",
        "release on comm in B 0.0 layer 2 combine",
        "on compute in W 0.0 layer 2 experts",
    ),
}
RACES = {
    "event_of_the_wrong_stream": (
        OVERLAP,
        "read without order: tensor bfloat16 [16, 16] of aten.index_select",
        "first  aten.index_select on compute in F 0.0 layer 1 pre_dispatch",
        "then   c10d.alltoall_base_ on comm in F 0.0 layer 1 dispatch",
        "comm has not waited for compute",
    ),
    "storage_resized_without_waiting": (
        OVERLAP,
        "freed before its last use",
        "then   release on compute in F 0.0 layer 1 dispatch",
    ),
    "gradient_buffer_on_comm": (
        OVERLAP,
        "allocated on the wrong stream: module.embedding.word_embeddings.weight main_grad float32",
        "first  aten.zeros on comm in construction",
        "allocate what outlives a stage on compute",
    ),
    "wgrad_buffer_reused": (
        DELAYED,
        "write without order: tensor bfloat16 [16, 8] of aten.zeros_like",
        "first  aten.add_ on comm in reduction of a product",
        "then   aten.copy_ on compute in W 0.0 layer 2 experts",
    ),
    "one_event_as_baton": (
        OVERLAP,
        "event of two streams",
        "first  event on compute in F 0.0 layer 1 pre_dispatch",
        "then   event on comm in F 0.0 layer 1 dispatch",
        "record an event of its own on each stream",
    ),
    "gradient_hook_on_comm": (
        (*OVERLAP, *ZERO),
        "read without order",
        "then   aten.add_ on comm in gradient hook at megatron/core/distributed/distributed_data_parallel.py",
    ),
    "shared_experts_not_joined_in_backward": (
        (*OVERLAP, *SHARED),
        "read without order: tensor bfloat16 [8, 1, 16] of aten.mul",
        "first  aten.mul on comm in B 0.0 layer 2 pre_dispatch",
        "then   aten.add on compute in B 0.0 layer 2 pre_dispatch",
    ),
    "sent_output_released": (
        (*TINY_MOE, *PIPELINE),
        "freed before its last use: tensor bfloat16 [8, 1, 16]",
        "first  c10d.send on pp messages with rank 1",
        "then   release on compute",
        "compute has not waited for pp messages with rank 1",
    ),
    "metadata_overwritten": (
        OVERLAP,
        "write without order: tensor bfloat16 [1] of aten.ones",
        "first  aten.mul on compute in B 0.0 layer 1 experts",
        "then   aten.fill_ on comm in F 0.1 layer 1 dispatch",
    ),
}


def expect_report(pool, mutant, flags, *texts):
    report = checked_run(pool, flags, mutant=mutant)
    missing = [text for text in texts if text not in report]
    assert not missing, f"{missing} not in:\n{report or 'no report'}"


@pytest.mark.parametrize("mutant", FAULTS)
def test_fault_is_reported(pool, mutant):
    expect_report(pool, mutant, *FAULTS[mutant])


@pytest.mark.parametrize(
    "mutant", [pytest.param(name, marks=[] if name == "wgrad_buffer_reused" else pytest.mark.full) for name in RACES]
)
def test_race_is_reported(pool, mutant):
    expect_report(pool, mutant, *RACES[mutant])


@pytest.mark.full
def test_last_weight_gradients_of_a_pipeline_are_missed(pool):
    report = checked_run(pool, PIPELINE_OVERLAP, 4, "last_weight_gradients_left_out")
    assert "backward without W for (chunk, microbatch) [(0, 0), (0, 1)," in report


@pytest.mark.parametrize(
    ("experts", "flags"), [("shadowed_experts", ONE_EXPERT), ("experts_that_read_counts", HYBRIDEP)]
)
def test_experts_of_the_doubles_are_silent(pool, experts, flags):
    assert checked_run(pool, (*DELAYED, *flags), mutant=experts) == ""


@pytest.mark.full
@pytest.mark.parametrize("flags", sorted({flags for flags, *_ in (FAULTS | RACES).values()}), ids=" ".join)
def test_same_run_without_the_fault_is_silent(pool, flags):
    assert checked_run(pool, flags) == ""
