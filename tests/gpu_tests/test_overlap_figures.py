"""Slice A with and without overlap, eager and captured: step time, what is hidden, what slows down, memory by stream.

One rank holds all experts and sends all rows to itself through the kernels of symmetric memory: all traffic is that of
one device's memory, which the compute beside it wants too. One run takes the ways to run a step one after the other,
the plain one first and last. Figures are printed and written to $OUT or the evidence.
"""

import gc
import statistics
import time
from typing import NamedTuple

import pytest
import torch

from megatron.core import streams
from megatron.core.fusions.fused_grouped_linear import grouped_linear
from megatron.core.pipeline_parallel.overlap.meter import OverlapMeter, hidden_share, union
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_launch import Launch
from megatron.core.utils.sm_reservation import leaving_sms_free
from megatron.training.callbacks.base import Callback
from tests.gpu_tests.test_graph_figures import FOLDER, GRAPH, MIB, slice_flags, train
from tools.benchmark.kernels import kernel_table, read_trace
from tools.benchmark.result import write_result
from tools.profile_overlap import read_spans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLAGS = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine symm_mem "
    "--global-batch-size 16 --train-iters {num_steps} "
)
ROWS, WIDTH, EXPERT_WIDTH, EXPERTS = 131072, 2048, 1536, 128
WARM_UP = 2
SETTLING, METERED, LAST_TIMED, PROFILED, STEPS_PER_WAY = 0, 1, 4, 5, 6
"""Steps of a way, the others are timed. Where steps are captured, the first one still is not, and the second is."""
LEFT_MIB = 1.0
DRIFT = 0.03
GROUPS = {
    "products of the experts": "GroupProblemShape",
    "weight gradients of the experts": "_grouped_wgrad",
    "attention": "sdpa",
    "dense products": "nvjet",
}
"""Kernels of compute by a part of their name."""
SHOWN_KERNELS = 25


class Way(NamedTuple):
    """How a step is run."""

    overlaps: bool = True
    num_sms: int = 0
    """Multiprocessors that the exchange has beside the experts; 0: it takes what it gets."""
    has_priority: bool = False
    delays_wgrad: bool = True


OFF = Way(overlaps=False, delays_wgrad=False)
WAYS = {
    "off": OFF,
    "on": Way(),
    "on, 16 SMs": Way(num_sms=16),
    "on, priority": Way(has_priority=True),
    "on, priority, 16 SMs": Way(num_sms=16, has_priority=True),
    "off again": OFF,
}
NUM_STEPS = WARM_UP + STEPS_PER_WAY * len(WAYS)


class Tour(Callback):
    """Takes a run through the ways; `figures` by way."""

    def __init__(self, folder):
        self.figures = {name: {} for name in WAYS}
        self._trace = folder / "trace.json"
        self._meter = OverlapMeter()
        self._times, self._after = [], []

    def on_step_start(self, run):
        self._name, self._phase = self._place(run)
        if self._phase == SETTLING:
            self._begin_way(run, WAYS[self._name])
        if self._phase == METERED:
            _forget_peaks()
            streams.set_observer(self._meter)
        torch.cuda.synchronize()
        if self._phase == PROFILED:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
        self._begin = time.perf_counter()

    def on_step_end(self, run, result):
        torch.cuda.synchronize()
        if self._phase is None:
            return
        if self._phase == METERED:
            streams.set_observer(None)
            self.figures[self._name]["hidden, by the meter"] = self._meter.take_share()
        elif self._phase == PROFILED:
            self._profiler.stop()
            self.figures[self._name] |= self._device_figures()
        elif self._phase != SETTLING:
            self._times.append(1e3 * (time.perf_counter() - self._begin))
            self._after.append(torch.cuda.memory_allocated() / MIB)
        if self._phase == LAST_TIMED:
            self._end_timing()

    @staticmethod
    def _place(run):
        """Name of the way that the coming step is of, and its number there; Nones before the first way."""
        way, phase = divmod(run.state.iteration - WARM_UP, STEPS_PER_WAY)
        return (list(WAYS)[way], phase) if way >= 0 else (None, None)

    def _begin_way(self, run, way):
        for chunk in run.model:
            chunk.config.overlap_moe_expert_parallel_comm = way.overlaps
            chunk.config.delay_wgrad_compute = way.delays_wgrad
            chunk.config.high_priority_a2a_comm_stream = way.has_priority
            chunk.config.moe_flex_dispatcher_num_sms = way.num_sms or None
            for module in chunk.modules():
                if hasattr(module, "token_dispatcher"):
                    module.token_dispatcher.engine._launch = Launch.of(way.num_sms or None, WIDTH)
        if run.guarded_steps is not None:
            run.guarded_steps._destroy_graphs()
            run.guarded_steps._is_due = lambda kind: self._phase > SETTLING
        self._times, self._after = [], []

    def _end_timing(self):
        assert abs(self._after[-1] - self._after[0]) <= LEFT_MIB, f"{self._name}: a step leaves memory: {self._after}"
        by_stream = reserved_by_stream()
        comm = streams._STATE.comm if WAYS[self._name].overlaps else None
        self.figures[self._name] |= {
            "step ms": statistics.median(self._times),
            "times ms": self._times,
            "memory MiB": {
                "stays": self._after[-1],
                "step in use": torch.cuda.max_memory_allocated() / MIB - self._after[-1],
                "step reserved": torch.cuda.max_memory_reserved() / MIB - self._after[-1],
                "reserved for the communication stream": by_stream.get(comm.cuda_stream, 0.0) if comm else 0.0,
            },
        }

    def _device_figures(self):
        """Of the profiled step: exchange and compute in all, what is hidden, kernels by group and by name."""
        self._profiler.export_chrome_trace(str(self._trace))
        events = read_trace(self._trace)
        spans, table = read_spans(events), kernel_table(events, 1)
        exchange = [span for kind, found in spans.items() if kind is not None for span in found]
        kernels = {row["name"]: row["ms"] for row in table["kernels"]}
        return {
            "hidden, by the profile": hidden_share(exchange, spans[None]),
            "exchange ms": sum(end - begin for begin, end in exchange) / 1e3,
            "compute ms": sum(end - begin for begin, end in spans[None]) / 1e3,
            "device busy with compute ms": sum(end - begin for begin, end in union(spans[None])) / 1e3,
            "device busy ms": table["busy_ms"],
            "device span ms": table["span_ms"],
            "groups ms": {
                group: sum(ms for name, ms in kernels.items() if part in name) for group, part in GROUPS.items()
            },
            "kernels ms": {name[-90:]: ms for name, ms in list(kernels.items())[:SHOWN_KERNELS]},
        }


def _forget_peaks():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def reserved_by_stream():
    """MiB of segments by the stream that they belong to."""
    found = {}
    for segment in torch.cuda.memory_snapshot():
        found[segment["stream"]] = found.get(segment["stream"], 0.0) + segment["total_size"] / MIB
    return found


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


def figures_of_all_ways(capfd, folder, name, flags):
    """Run the tour; its figures, printed, written and returned."""
    streams.reset()
    torch.cuda.Stream(priority=-1)  # made before a capture could need it
    tour = Tour(folder)
    found = {"product TFLOP/s": {str(n): product_tflops(n) for n in (0, 8, 16, 32)}, "ways": tour.figures}
    try:
        train(slice_flags(FLAGS.format(num_steps=NUM_STEPS) + flags), [tour], capfd)
    finally:
        streams.reset()
        for way, figures in tour.figures.items():
            print(way, {key: value for key, value in figures.items() if key != "kernels ms"})
        write_result(FOLDER / f"{name}.json", found)
    return tour.figures


def test_eager_ways_of_slice_a(capfd, tmp_path):
    found = figures_of_all_ways(capfd, tmp_path, "overlap-A-1gpu", "")
    off, on = found["off"], found["on"]
    assert abs(found["off again"]["step ms"] / off["step ms"] - 1) <= DRIFT
    assert off["memory MiB"]["reserved for the communication stream"] == 0.0
    assert on["memory MiB"]["reserved for the communication stream"] > 0.0
    assert on["memory MiB"]["step in use"] > off["memory MiB"]["step in use"]
    assert off["hidden, by the meter"] is None
    assert on["hidden, by the meter"] > 0.3
    assert off["hidden, by the profile"] == 0.0
    assert on["hidden, by the profile"] > 0.3


def test_captured_ways_of_slice_a(capfd, tmp_path):
    found = figures_of_all_ways(capfd, tmp_path, "overlap-A-graph-1gpu", GRAPH)
    off, on = found["off"], found["on"]
    assert abs(found["off again"]["step ms"] / off["step ms"] - 1) <= DRIFT
    assert off["hidden, by the profile"] == 0.0
    assert on["hidden, by the profile"] > 0.3
