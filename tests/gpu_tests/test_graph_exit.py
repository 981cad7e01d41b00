"""Programs with captured steps end on every way out: right exit code, within seconds of what ends them.

All programs run at once on one GPU. What happens at a step is a callback of the program; it prints the time.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.common.captured_runs import DROP_PAD, DROPOUT, GRAPH, MODEL
from tests.functional_tests.cases import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT_S = 20.0
START_LIMIT_S = 80.0
PROGRAM = """
import os, signal, sys, time
import torch
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training.callbacks.base import Callback
from megatron.training.training import pretrain

class Event(Callback):
    def on_step_end(self, run, result):
        print(f"event {time.time()}", flush=True)
        if run.state.iteration == 8 and "fail" in sys.argv[1]:
            raise RuntimeError("a failure after a replay")
        if run.state.iteration == 8 and "signal" in sys.argv[1]:
            os.kill(os.getpid(), signal.SIGTERM)

def forward_step(*args):
    if torch.cuda.is_current_stream_capturing() and "capture" in sys.argv[1]:
        raise ValueError("a failure in a capture")
    return pretrain_gpt.forward_step(*args)

pretrain(
    pretrain_gpt.train_valid_test_datasets_provider,
    pretrain_gpt.model_provider,
    ModelType.encoder_or_decoder,
    forward_step,
    argv=sys.argv[2:],
    callbacks=[Event()],
)
"""
WAYS = {
    "end": ("--train-iters 12", 0),
    "interval": ("--train-iters 1000 --exit-interval 8", 0),
    "fail": ("--train-iters 1000", 1),
    "capture": ("--train-iters 1000", 1),
    "signal, caught": ("--train-iters 1000 --exit-signal-handler", 0),
    "signal": ("--train-iters 1000", -signal.SIGTERM),
}


def test_every_way_out_ends_within_seconds(tmp_path):
    model = MODEL.replace("--deterministic-mode --log-state-hash", "").replace("--log-num-zeros-in-grad", "")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes, ended = {}, {}
    for way, (flags, _) in WAYS.items():
        words = [sys.executable, "-c", PROGRAM, way, *f"{model}{DROP_PAD}{DROPOUT['0']}{GRAPH}{flags}".split()]
        with (tmp_path / way).open("w") as log:
            processes[way] = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)
    until = time.monotonic() + START_LIMIT_S + LIMIT_S
    while len(ended) < len(WAYS) and time.monotonic() < until:
        for way, process in processes.items():
            if way not in ended and process.poll() is not None:
                ended[way] = time.time()
        time.sleep(0.05)
    for way in set(WAYS) - set(ended):
        processes[way].kill()
        processes[way].wait()
    logs = {way: (tmp_path / way).read_text() for way in WAYS}
    late = {way: logs[way][-2000:] for way in WAYS if way not in ended}
    assert not late, late
    events = {
        way: [float(line.split()[1]) for line in log.splitlines() if line.startswith("event ")]
        for way, log in logs.items()
    }
    for way, (_, code) in WAYS.items():
        assert processes[way].returncode == code, logs[way][-3000:]
        assert ("captured a graph" in logs[way]) == (way != "capture"), logs[way][-3000:]
    seconds = {way: ended[way] - events[way][-1] for way in WAYS}
    print({way: f"code {processes[way].returncode}, {seconds[way]:.1f} s" for way in WAYS})
    assert max(seconds.values()) <= LIMIT_S
