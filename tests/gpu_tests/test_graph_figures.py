"""A captured step of slice A beside an eager one: step time, time of the host, idle device, memory and where it goes.

Figures are printed and written to $OUT or the evidence. The launch line is that of tools/benchmark/slices/A.sh.
"""

import gc
import logging
import os
import statistics
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.full_iteration_graph import CudaRecording, FullIterationGraph
from megatron.core.full_iteration_graph.static_inputs import StaticInputs
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.training import training
from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.exit import ExitConditions
from megatron.training.callbacks.metrics import TrainingLog
from megatron.training.guarded_steps import GuardedSteps
from megatron.training.initialize import shut_down
from tests.common.mutants import replaced
from tools.benchmark.result import ROOT, write_result
from tools.run_metrics import parse_log

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(os.environ.get("OUT", ROOT / "docs" / "evidence" / "benchmarks"))
SLICE = ROOT / "tools" / "benchmark" / "slices" / "A.sh"
GRAPH = "--cuda-graph-impl full_iteration"
NUM_STEPS = {"eager": 6, "graph": 9}
NUM_EAGER = 2
FIRST_TIMED_STEP = 4
PARTS = {
    "step": (training, "train_step"),
    "loss scale": (MegatronOptimizer, "settle"),
    "rates of the schedule": (OptimizerParamScheduler, "step"),
    "log": (TrainingLog, "on_step_end"),
    "router figures": (TrainingLog, "_take_router_figures"),
    "interval": (TrainingLog, "_end_interval"),
    "exit conditions": (ExitConditions, "on_step_end"),
    "rates on the device": (MegatronOptimizer, "write_learning_rates"),
    "addresses": (FullIterationGraph, "_check_addresses"),
    "inputs": (StaticInputs, "fill"),
}
"""Calls between the read of a step and the launch of the next."""
MIB = 2**20


def slice_flags(flags):
    """The words behind the program's name in the launch file of the slice."""
    environment = {**os.environ, "PYTHON": "echo", "GPUS": "1"}
    words = subprocess.check_output(["bash", str(SLICE), *flags.split()], env=environment, text=True)
    return words.split("pretrain_gpt.py ")[1].split()


def state_of_memory(segments):
    """What a list of segments holds, MiB: in use, free between used blocks, by stream and by kind of segment."""
    free = sorted(
        (block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"),
        reverse=True,
    )
    by_stream, by_kind = Counter(), Counter()
    for segment in segments:
        by_stream[segment["stream"]] += segment["total_size"] / MIB
        by_kind[segment["segment_type"]] += segment["total_size"] / MIB
    return {
        "reserved": sum(segment["total_size"] for segment in segments) / MIB,
        "held": sum(segment["allocated_size"] for segment in segments) / MIB,
        "segments": len(segments),
        "by stream": list(by_stream.values()),
        "by kind": dict(by_kind),
        "largest free": [size / MIB for size in free[:5]],
    }


class EagerMemory(Callback):
    """What an eager step takes beside what stays: most in use at a time, and most reserved, MiB."""

    def __init__(self):
        self.figures = {}

    def on_step_end(self, run, result):
        if run.state.iteration == 2:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        if run.state.iteration == 3:
            self.figures = {
                "stays": self.before[0] / MIB,
                "step in use": (torch.cuda.max_memory_allocated() - self.before[0]) / MIB,
                "step reserved": (torch.cuda.max_memory_reserved() - self.before[1]) / MIB,
            }


class CaptureMemory:
    """The same of a capture, and what its pool holds afterwards."""

    def __init__(self):
        self.figures = {}

    def watched(self, capture):
        def wrapper(graph):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            begin = time.perf_counter()
            capture(graph)
            pool = graph._recording._pool
            self.figures = {
                "stays": before / MIB,
                "step in use": (torch.cuda.max_memory_allocated() - before) / MIB,
                "pool": state_of_memory(torch.cuda.memory_snapshot(pool.id)),
                "seconds of the capture": time.perf_counter() - begin,
            }

        return wrapper


class StepClock:
    """When the host launches and has read, and when the device begins the first and ends the last node of a replay.

    A launch of many nodes waits on the host until the device has taken most of them. To show it, the last replay is
    launched behind a device that sleeps: what is work of the host would not take longer.
    """

    SLEEP_CYCLES = 10**9

    def __init__(self, num_replays):
        self.num_replays = num_replays
        self.launched, self.called, self.read, self.idle, self.busy = [], [], [], [], []
        self.first = torch.cuda.Event(enable_timing=True, external=True)
        self.last = torch.cuda.Event(enable_timing=True, external=True)
        self.ended = self.ends = None
        self.sleep = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.marks = []

    def timed_record(self, record):
        def wrapper(recording, call):
            def timed_call():
                self.first.record()
                result = call()
                self.last.record()
                return result

            record(recording, timed_call)

        return wrapper

    def timed_repeat(self, repeat):
        def wrapper(recording):
            self.called.append(now())
            if len(self.called) == self.num_replays:
                self.sleep[0].record()
                torch.cuda._sleep(self.SLEEP_CYCLES)
                self.sleep[1].record()
            begin = now()
            result = repeat(recording)
            self.launched.append((begin, now()))
            self.ends = torch.cuda.Event(enable_timing=True)
            self.ends.record()
            return result

        return wrapper

    def timed_read(self, read):
        def wrapper(steps, outputs):
            begin = now()
            report = read(steps, outputs)
            if self.launched:
                self._note_device()
            self.read.append((begin, now()))
            return report

        return wrapper

    def marked(self, name, call):
        """`call` with its begin and end noted."""

        def wrapper(*args, **options):
            self.marks.append((f"until {name}", now()))
            result = call(*args, **options)
            self.marks.append((name, now()))
            return result

        return wrapper

    def _note_device(self):
        """Device times of the replay that has just ended; its events are recorded again by the next one."""
        if self.ended is not None:
            self.idle.append(self.ended.elapsed_time(self.first))
        self.busy.append(self.first.elapsed_time(self.last))
        self.ended = self.ends

    def parts(self):
        """Where the host is between a read and the next launch: median ms from mark to mark, in their order."""
        found = {}
        for begin, end in self._gaps():
            before = begin[0]
            marks = [(name, at[0]) for name, at in self.marks if begin[0] <= at[0] <= end[0]]
            for name, at in [*marks, ("until the launch", end[0])]:
                found.setdefault(name, []).append((at - before) * 1e3)
                before = at
        return {name: statistics.median(times) for name, times in found.items()}

    def _gaps(self):
        reads = self.read[-len(self.called) :]
        return [(reads[i - 1][1], self.called[i]) for i in range(1, len(self.called) - 1)]

    def figures(self):
        """Medians over the replays, ms; "at work" is processor time of the thread, waits that spin included."""
        launches, reads = self.launched[:-1], self.read[-len(self.launched) : -1]
        slow, sleep = self.launched[-1], self.sleep[0].elapsed_time(self.sleep[1])
        medians = {
            "host ms before a launch": median_ms(0, self._gaps()),
            "host ms at work before a launch": median_ms(1, self._gaps()),
            "host ms of a launch": median_ms(0, launches),
            "host ms at work in a launch": median_ms(1, launches),
            "host ms of a launch behind a sleep": median_ms(0, [slow]),
            "device ms of that sleep": sleep,
            "host ms at work beside the device": median_ms(
                1, [(launch[1], read[0]) for launch, read in zip(launches, reads, strict=True)]
            ),
            "device ms between two replays": statistics.median(self.idle[:-1]),
            "device ms of a replay": statistics.median(self.busy),
        }
        idle, busy = medians["device ms between two replays"], medians["device ms of a replay"]
        return {**medians, "idle share": idle / (idle + busy), "parts before a launch, ms": self.parts()}


def now():
    """Time, and processor time of this thread, s."""
    return time.perf_counter(), time.thread_time()


def median_ms(index, spans):
    """Median length of pairs of `now()` by the first or second clock, ms."""
    return statistics.median((end[index] - begin[index]) * 1e3 for begin, end in spans)


def train(words, callbacks, capfd):
    """Run the program in this process and drop what it leaves; returns the step times by step."""
    logging.getLogger("megatron").handlers.clear()
    try:
        training.pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            pretrain_gpt.forward_step,
            argv=words,
            callbacks=callbacks,
        )
    finally:
        shut_down()
    gc.collect()
    torch.cuda.empty_cache()
    out, err = capfd.readouterr()
    return parse_log(out + err)["elapsed time per iteration (ms)"]


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_captured_step_of_slice_a_beside_an_eager_one(micro_batch_size, capfd):
    flags = f"--micro-batch-size {micro_batch_size} --train-iters "
    eager_memory, capture_memory = EagerMemory(), CaptureMemory()
    clock = StepClock(NUM_STEPS["graph"] - NUM_EAGER)
    times = {"eager": train(slice_flags(flags + str(NUM_STEPS["eager"])), [eager_memory], capfd)}
    with (
        ExitStack() as stack,
        replaced(FullIterationGraph, "capture", capture_memory.watched(FullIterationGraph.capture)),
        replaced(CudaRecording, "record", clock.timed_record(CudaRecording.record)),
        replaced(CudaRecording, "repeat", clock.timed_repeat(CudaRecording.repeat)),
        replaced(GuardedSteps, "_read", clock.timed_read(GuardedSteps._read)),
    ):
        for name, (owner, attribute) in PARTS.items():
            stack.enter_context(replaced(owner, attribute, clock.marked(name, getattr(owner, attribute))))
        times["graph"] = train(slice_flags(f"{flags}{NUM_STEPS['graph']} {GRAPH}"), [], capfd)
    step_ms = {
        name: statistics.median(ms for step, ms in series.items() if FIRST_TIMED_STEP <= step < NUM_STEPS[name])
        for name, series in times.items()
    }
    eager, graph = eager_memory.figures, capture_memory.figures
    figures = {
        "micro_batch_size": micro_batch_size,
        "step ms": step_ms,
        "replay": clock.figures(),
        "memory MiB": {"eager": eager, "graph": graph},
        "pool over eager peak": graph["pool"]["reserved"] / eager["step in use"],
        "pool over eager reserved": graph["pool"]["reserved"] / eager["step reserved"],
        "cause: in use at a time": graph["step in use"] / eager["step in use"],
        "cause: held after the capture, MiB": graph["pool"]["held"],
        "cause: between used blocks, MiB": graph["pool"]["reserved"] - graph["step in use"],
    }
    print(figures)
    write_result(FOLDER / f"graph-A-mbs{micro_batch_size}-1gpu.json", figures)
    assert figures["pool over eager peak"] <= 1.1
    assert figures["replay"]["host ms before a launch"] <= 2.0
    assert figures["replay"]["idle share"] <= 0.02
    assert step_ms["graph"] <= 1.02 * step_ms["eager"]


def test_capture_into_memory_that_grows_in_place(capfd):
    """The same capture where the pool's segments grow: what is lost between blocks of unlike sizes."""
    memory = CaptureMemory()
    capture = memory.watched(FullIterationGraph.capture)

    def growing(graph):
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            capture(graph)
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")

    with replaced(FullIterationGraph, "capture", growing):
        times = train(slice_flags(f"--train-iters 5 {GRAPH}"), [], capfd)
    print({"memory MiB": memory.figures, "step ms": times})
