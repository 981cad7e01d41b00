"""The combined schedule replayed from a CUDA graph: bits of the plain eager one, late stages, poison, the four faults.

Delays and poison are kernels of the graph, so each replay provokes what a missing order or an early release would do.
One GPU: the exchange is a copy on the communication stream.
"""

from contextlib import ExitStack

import pytest
import torch

from megatron.core.pipeline_parallel.overlap.layer_plan import LayerPlan
from megatron.core.pipeline_parallel.overlap.nodes import StageNode
from megatron.core.pipeline_parallel.overlap.protocol import Stage
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.captured_step import CapturedStep, plain_gradients
from tests.common.mutants import replaced
from tests.common.overlapped_model import MAX_LENGTH, ShadowedExperts, assert_equal_bits, make_batches, run_step
from tests.common.stream_mutants import ALL_KEPT
from tests.gpu_tests.test_overlap import delayed, gpu_model, memory_of_comm_overwritten
from tests.unit_tests.core.pipeline_parallel.overlap.test_faults import (
    LENGTHS,
    inputs_overwritten,
    on_the_other_stream,
    without_hold,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic_device"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEEDS = (3, 7, 3)
"""Batches of the replays."""
MIB = 2**20


def differing(model, *seams, **options):
    """Names of the gradients that differ between replays and plain eager steps; `seams` are open during the capture."""
    plain = {seed: plain_gradients(model, LENGTHS, seed) for seed in SEEDS}
    with ExitStack() as stack:
        for seam in seams:
            stack.enter_context(seam)
        step = CapturedStep(model, LENGTHS, **options)
    wrong = set()
    for seed in SEEDS:
        got = step.run(seed)
        wrong |= {name for name, grad in plain[seed].items() if not torch.equal(grad, got[name])}
    torch.cuda.synchronize()
    step.destroy()
    return wrong


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("delays_wgrad", [False, True], ids=["at once", "delayed"])
def test_replayed_overlap_gives_the_bits_of_the_plain_schedule(is_shuffled, delays_wgrad):
    model = gpu_model(is_shuffled=is_shuffled, moe_shared_expert_intermediate_size=256)
    assert_equal_bits(plain_gradients(model, LENGTHS), plain_gradients(model, LENGTHS))  # else nothing to compare
    assert differing(model, inputs_overwritten(), delays_wgrad=delays_wgrad) == set()


@pytest.mark.parametrize("stage", list(Stage), ids=lambda stage: stage.value)
def test_late_stages_of_a_replay_change_no_bit(stage):
    for kind in ("forward", "backward", "weight_grads"):
        assert differing(gpu_model(), delayed(stage, kind), delays_wgrad=True) == set(), kind


def test_f1_captured_weight_gradients_wait_for_their_stage():
    late = delayed(Stage.EXPERTS, "backward")
    undone = replaced(StageNode, "weight_grads", on_the_other_stream)
    assert differing(gpu_model(), late, undone, delays_wgrad=True)


def test_f4_captured_rows_that_backward_reads_are_not_released():
    undone = replaced(MoELayer, "saved_inputs", lambda self: frozenset())
    assert differing(gpu_model(), undone, inputs_overwritten(), delays_wgrad=True)


def counts_of_a_replay(close=None):
    """The counts that late kernels of each backward read in a replay whose free memory is overwritten at once."""
    model = gpu_model(counts_late=True, shadow=True)
    layers = [module for module in model.modules() if isinstance(module, ShadowedExperts)]
    with ExitStack() as stack:
        if close is not None:
            stack.enter_context(replaced(LayerPlan, "close", close))
        stack.enter_context(memory_of_comm_overwritten())
        stack.enter_context(delayed(Stage.EXPERTS, "weight_grads"))
        step = CapturedStep(model, LENGTHS, delays_wgrad=True)
    captured = [layer.counts_seen[len(LENGTHS) :] for layer in layers]  # behind those of the eager step
    step.run(5)
    torch.cuda.synchronize()
    return sorted(int(counts.sum()) for seen in captured for counts in seen)


def test_f3_captured_counts_live_until_the_last_stream_has_read_them():
    rows = sorted(2 * 2 * length for length in LENGTHS for _ in range(2))  # 2 samples, top-2; 2 layers
    assert counts_of_a_replay() == rows
    undone = counts_of_a_replay(close=without_hold)
    print(f"counts with the hold undone: {undone}, true: {rows}")
    assert undone != rows


def captured_bytes(model, lengths, *seams):
    """Most bytes in use at a time during a capture, and the bytes of its pool."""
    with ExitStack() as stack:
        for seam in seams:
            stack.enter_context(seam)
        torch.cuda.synchronize()
        peak = []
        begin = torch.cuda.CUDAGraph.capture_begin

        def noted(graph, *args, **options):
            torch.cuda.reset_peak_memory_stats()
            peak.append(torch.cuda.memory_allocated())
            return begin(graph, *args, **options)

        stack.enter_context(replaced(torch.cuda.CUDAGraph, "capture_begin", noted))
        stack.enter_context(replaced(torch.Tensor, "record_stream", refuse_record_stream))
        step = CapturedStep(model, lengths, delays_wgrad=True)
        in_use, reserved = torch.cuda.max_memory_allocated() - peak[0], step.pool.reserved_bytes()
    step.run()
    torch.cuda.synchronize()
    step.destroy()
    for layer in [module for module in model.modules() if isinstance(module, ShadowedExperts)]:
        layer.counts_seen.clear()
    return in_use, reserved


def refuse_record_stream(tensor, stream):
    raise AssertionError("record_stream: the block would not be used again before the capture ends")


WIDE = {"hidden_size": 1024, "moe_ffn_hidden_size": 1024}


def test_f2_rows_of_which_bytes_were_saved_are_no_part_of_the_pool():
    """Rows bf16 [2 samples x top-2 x 512, 1024] of two layers, for each of the two microbatches in flight."""
    rows = 2 * 2 * MAX_LENGTH * WIDE["hidden_size"] * 2
    fixed, _ = captured_bytes(gpu_model(shadow=True, **WIDE), [MAX_LENGTH] * 3)
    keeps = replaced(MoELayer, "saved_inputs", lambda self: ALL_KEPT)
    undone, _ = captured_bytes(gpu_model(shadow=True, **WIDE), [MAX_LENGTH] * 3, keeps)
    print(f"in use at a time: {fixed} bytes, with the release undone {undone}; rows of a layer {rows}")
    assert undone - fixed >= 0.9 * rows


def test_pool_of_twenty_layers_on_two_streams_is_the_peak_of_an_eager_step():
    model, lengths = gpu_model(num_layers=20, **WIDE), [MAX_LENGTH] * 4
    batches = make_batches(lengths, "cuda")
    for _ in range(2):  # workspaces first
        torch.cuda.synchronize()
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_step(model, batches, delays_wgrad=True)
        torch.cuda.synchronize()
        eager = torch.cuda.max_memory_allocated() - before
    model.zero_grad()
    in_use, reserved = captured_bytes(model, lengths)
    print(f"eager {eager / MIB:.0f} MiB, captured {in_use / MIB:.0f} MiB in use, {reserved / MIB:.0f} MiB in the pool")
    assert in_use <= 1.02 * eager
    assert reserved <= 1.1 * eager
