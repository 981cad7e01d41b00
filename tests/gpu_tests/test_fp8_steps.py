"""Whole steps in FP8 on a GPU: what a microbatch in flight costs, and captured steps beside eager ones.

The dispatcher is that of symmetric memory, on one rank; its rows arrive padded, so that experts save codes of them.
"""

import gc

import pytest
import torch

from megatron.core import graph_state, streams
from megatron.core.fp8.recipes import RECIPES
from megatron.core.pipeline_parallel.overlap.worker import OverlapWorker
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.captured_runs import GRAPH, assert_equal_runs
from tests.common.mutants import replaced
from tests.common.overlapped_model import MAX_LENGTH, run_microbatches
from tests.common.stream_mutants import ALL_KEPT
from tests.gpu_tests.test_graph_faults import WIDE, captured_bytes
from tests.gpu_tests.test_overlap import SYMM_MEM, gpu_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic_device"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_LAYERS = 2
ROWS_BYTES = 2 * 2 * MAX_LENGTH * WIDE["hidden_size"] * 2
"""Rows bf16 [2 samples x top-2 x 512, 1024] of one layer, without padding."""


def fp8_model(recipe="delayed"):
    return gpu_model(**WIDE, **SYMM_MEM, fp8="e4m3", fp8_recipe=recipe)


def rows_kept():
    """The release undone: every layer says that its experts save their rows."""
    return replaced(MoELayer, "saved_inputs", lambda self: ALL_KEPT)


def requested_bytes():
    """Bytes of all tensors: what was asked for, without the rests of cached blocks, up to 1 MiB each, that come along.

    A tensor that goes early leaves a block for others to fill in part; `memory_allocated` counts such blocks whole.
    """
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def bytes_in_flight(model):
    """Bytes that one microbatch of full length holds between its forward and its backward: tensors, and blocks."""
    run_microbatches(model, 2, lengths=[MAX_LENGTH] * 2)  # workspaces
    model.zero_grad()
    gc.collect()  # what an earlier model left must not go meanwhile
    torch.cuda.synchronize()
    before, found, forward = (requested_bytes(), torch.cuda.memory_allocated()), [], OverlapWorker.forward

    def watched(self, action, received):
        output = forward(self, action, received)
        streams.join()  # nothing waits for a stream any more
        found.append((requested_bytes() - before[0], torch.cuda.memory_allocated() - before[1]))
        return output

    with replaced(OverlapWorker, "forward", watched):
        run_microbatches(model, 1, lengths=[MAX_LENGTH])
    model.zero_grad()
    torch.cuda.synchronize()
    return found[0]


@pytest.mark.parametrize("recipe", [name for name, spec in RECIPES.items() if spec.covers_experts])
def test_microbatch_in_flight_is_without_the_rows_of_its_experts(recipe):
    fixed, fixed_blocks = bytes_in_flight(fp8_model(recipe))
    with rows_kept():
        undone, undone_blocks = bytes_in_flight(fp8_model(recipe))
    print(f"{recipe}: in flight {fixed} bytes, with the release undone {undone}; rows of a layer {ROWS_BYTES}")
    print(f"in blocks of the allocator {fixed_blocks} and {undone_blocks}")
    assert 0.98 * NUM_LAYERS * ROWS_BYTES <= undone - fixed <= 1.3 * NUM_LAYERS * ROWS_BYTES


def test_pool_of_a_graph_is_without_the_rows_of_the_experts():
    fixed, pool = captured_bytes(fp8_model(), [MAX_LENGTH] * 3)
    undone, undone_pool = captured_bytes(fp8_model(), [MAX_LENGTH] * 3, rows_kept())
    print(f"in use at a time {fixed} bytes, undone {undone}; pool {pool}, undone {undone_pool}; rows {ROWS_BYTES}")
    assert undone - fixed >= 0.9 * ROWS_BYTES


STEPS = "--attention-dropout 0 --hidden-dropout 0 --train-iters 20 --log-interval 5 --eval-interval 10 "
FORMS = {
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max ",
    "tensorwise": "--fp8-format e4m3 --fp8-recipe tensorwise --moe-permute-fusion ",
    "rowwise": "--fp8-format hybrid --fp8-recipe rowwise ",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise --moe-permute-fusion ",
    "flex": "--fp8-format hybrid --fp8-recipe delayed --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend hybridep ",
}


@pytest.mark.parametrize("form", FORMS)
def test_captured_fp8_steps_are_the_eager_ones(start, form):
    _, eager = start(STEPS + FORMS[form])
    run, captured = start(STEPS + FORMS[form] + GRAPH)
    assert_equal_runs(eager, captured, 5)
    assert run.counters["graph replays"] >= 16
    assert graph_state.num_graphs() == 0


def test_overflowing_steps_in_fp8_are_the_eager_ones(start):
    """Amaxes of the attempts that overflow are not those of the step."""
    _, eager = start(STEPS + FORMS["delayed"])
    run, log = start(STEPS + FORMS["delayed"] + GRAPH + "--moe-expert-rank-capacity-factor 0.5 ")
    assert_equal_runs(eager, log, 5)
    assert run.counters["re-runs"] >= 16
