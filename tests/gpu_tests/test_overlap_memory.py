"""Memory of slice A with and without overlap, in use and reserved, and how much of it belongs to the other stream.

A block of the allocator stays with the stream that it was made for, so that two streams reserve more than is in use.
One rank holds all experts, and the kernels of symmetric memory send its rows to itself. Figures are printed and written
to $OUT or the evidence.
"""

import gc

import pytest
import torch

from megatron.core import streams
from megatron.training.callbacks.base import Callback
from tests.gpu_tests.test_graph_figures import FOLDER, MIB, slice_flags, train
from tests.gpu_tests.test_overlap_runs import SwitchOn
from tools.benchmark.result import write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLAGS = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine symm_mem "
    "--global-batch-size 16 --train-iters 5"
)
WAYS = {"off": [], "on": [SwitchOn(False)], "on, wgrads delayed": [SwitchOn(True)]}
LEFT_MIB = 1.0


class StreamMemory(Callback):
    """The last steps, MiB: most in use and reserved beside what stays, what the streams reserved, what is left."""

    def __init__(self):
        self.after, self.figures = [], {}

    def on_step_start(self, run):
        if run.state.iteration == 2:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, run, result):
        torch.cuda.synchronize()
        self.after.append(torch.cuda.memory_allocated() / MIB)
        if run.state.iteration == 5:
            in_use, reserved = torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB
            by_stream = reserved_by_stream()
            comm = streams._STATE.comm
            self.figures = {
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


def test_memory_of_slice_a_by_stream(capfd):
    found = {}
    for name, switches in WAYS.items():
        streams.reset()
        watch = StreamMemory()
        train(slice_flags(FLAGS), [*switches, watch], capfd)
        gc.collect()
        torch.cuda.empty_cache()
        found[name] = watch.figures
        assert abs(watch.after[-1] - watch.after[-2]) <= LEFT_MIB, f"{name}: a step leaves memory: {watch.after}"
    print(found)
    write_result(FOLDER / "overlap-memory-A-1gpu.json", found)
    assert found["off"]["reserved for the communication stream"] == 0.0
    assert found["on"]["reserved for the communication stream"] > 0.0
    assert found["on"]["step in use"] > found["off"]["step in use"]
