"""Slice A with and without overlap: step time, hidden share, memory by stream, by the room that the exchange has.

One rank holds all experts and sends all rows to itself through the kernels of symmetric memory, so that there is more
to hide than between GPUs. Eager: the host is ahead of the device in this slice. A block of the allocator stays with the
stream that it was made for, so that two streams reserve more than is in use. Figures are printed and written to $OUT or
the evidence.
"""

import gc
import statistics

import pytest
import torch

from megatron.core import streams
from megatron.core.fusions.fused_grouped_linear import grouped_linear
from megatron.core.utils.sm_reservation import leaving_sms_free
from megatron.training.callbacks.hidden_share import HiddenShare
from tests.gpu_tests.test_graph_figures import FOLDER, MIB, slice_flags, train
from tests.gpu_tests.test_overlap_runs import SwitchOn
from tools.benchmark.result import write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_STEPS = 6
FLAGS = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine symm_mem "
    f"--global-batch-size 16 --train-iters {NUM_STEPS}"
)
FIRST_TIMED_STEP = 4
LEFT_MIB = 1.0
ROWS, WIDTH, EXPERT_WIDTH, EXPERTS = 131072, 2048, 1536, 128


class Figures(HiddenShare):
    """Of the last steps: hidden share; MiB most in use and reserved beside what stays, by stream, and what is left."""

    def __init__(self):
        super().__init__()
        self.shares, self.after, self.memory = [], [], {}

    def on_step_start(self, run):
        super().on_step_start(run)
        if run.state.iteration == 2:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, run, result):
        super().on_step_end(run, result)
        torch.cuda.synchronize()
        self.shares.append(run.hidden_share)
        self.after.append(torch.cuda.memory_allocated() / MIB)
        if run.state.iteration == NUM_STEPS:
            in_use, reserved = torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB
            by_stream, comm = reserved_by_stream(), streams._STATE.comm
            self.memory = {
                "stays": self.after[-1],
                "step in use": in_use - self.after[-1],
                "step reserved": reserved - self.after[-1],
                "reserved beyond in use": reserved - in_use,
                "reserved by stream": sorted(by_stream.values(), reverse=True),
                "reserved for the communication stream": by_stream.get(comm.cuda_stream, 0.0) if comm else 0.0,
            }


def reserved_by_stream():
    """MiB of segments by the stream that they belong to."""
    found = {}
    for segment in torch.cuda.memory_snapshot():
        found[segment["stream"]] = found.get(segment["stream"], 0.0) + segment["total_size"] / MIB
    return found


def figures_of(capfd, num_sms=0, switches=()):
    """Figures of one way to run the slice; without multiprocessors the exchange has the whole device and no room."""
    streams.reset()
    watch = Figures()
    room = f" --moe-flex-dispatcher-num-sms {num_sms}" if num_sms else ""
    times = train(slice_flags(FLAGS + room), [*switches, watch], capfd)
    shares = [share for share in watch.shares if share is not None]
    assert abs(watch.after[-1] - watch.after[-2]) <= LEFT_MIB, f"a step leaves memory: {watch.after}"
    return {
        "step ms": statistics.median(ms for step, ms in times.items() if step >= FIRST_TIMED_STEP),
        "hidden": statistics.median(shares) if shares else None,
        "memory MiB": watch.memory,
    }


def product_tflops(num_sms, repeats=20):
    """A grouped product of the slice's experts beside nothing, with some multiprocessors left free."""
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    weights = list(torch.randn(EXPERTS, EXPERT_WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda").unbind(0))
    counts = torch.full((EXPERTS,), ROWS // EXPERTS, dtype=torch.int64, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.no_grad(), leaving_sms_free(num_sms):
        for i in range(repeats + 3):
            if i == 3:
                begin.record()
            grouped_linear(rows, weights, counts, None, False)
    end.record()
    torch.cuda.synchronize()
    return 2e-9 * ROWS * WIDTH * EXPERT_WIDTH * repeats / begin.elapsed_time(end)


def run_ways(capfd, name, rooms):
    """Figures without overlap and with each room, written and returned."""
    found = {"product TFLOP/s": {str(n): product_tflops(n) for n in (0, 8, 16, 32)}, "off": figures_of(capfd)}
    for num_sms in rooms:
        found[f"on, {num_sms} SMs"] = figures_of(capfd, num_sms, [SwitchOn(True)])
    print(found)
    write_result(FOLDER / f"{name}.json", found)
    return found


def test_step_and_memory_of_slice_a(capfd):
    found = run_ways(capfd, "overlap-A-1gpu", (0, 16))
    off, on = found["off"], found["on, 16 SMs"]
    assert off["memory MiB"]["reserved for the communication stream"] == 0.0
    assert on["memory MiB"]["reserved for the communication stream"] > 0.0
    assert on["memory MiB"]["step in use"] > off["memory MiB"]["step in use"]
    assert on["hidden"] > 0


def test_step_of_slice_a_with_more_room(capfd):
    run_ways(capfd, "overlap-A-rooms-1gpu", (8, 32))
