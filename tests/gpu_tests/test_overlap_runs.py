"""Runs of the program with the combined schedule on one GPU: what is reported as hidden, and captured steps.

One rank holds all experts, and the kernels of symmetric memory send its rows to itself. The program refuses overlap
there, as nothing needs to be hidden; a callback switches it on.
"""

import contextlib
import io
import json
import statistics

import pytest
import torch

from megatron.core import streams
from megatron.core.pipeline_parallel.overlap.meter import OverlapMeter
from megatron.core.streams import Role
from megatron.training.callbacks.hidden_share import HiddenShare
from tests.common.captured_runs import DROPOUT, GRAPH, MODEL, Disturbances, SwitchOn
from tools.profile_overlap import SYMMETRIC_KERNELS, StageRanges, main, read_spans, report
from tools.run_metrics import parse_state_hashes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SYMM_MEM = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine symm_mem "
    "--train-iters {steps} --eval-iters 0 "
)
NUM_STEPS, HASH_INTERVAL = 28, 7  # 3 eager, then replays
CAPTURED = f"{SYMM_MEM.format(steps=NUM_STEPS)}--log-interval {HASH_INTERVAL} "
FAST = MODEL.replace("--deterministic-mode --log-state-hash", "").replace("--log-num-zeros-in-grad", "")
SLEEP_CYCLES = 20_000_000
"""Some 10 ms."""
GEMM = ("gemm", "nvjet", "cutlass")


@pytest.fixture(autouse=True)
def _fresh_streams():
    yield
    torch.cuda.synchronize()
    streams.reset()


# What is known: one sleeping kernel in each stage, beside each other or one after the other.


def two_stages(is_hidden: bool) -> None:
    """A dispatch, and the experts of another microbatch beside or behind it."""
    with streams.step(torch.device("cuda")):
        with streams.on(Role.COMM, "F 0.1 layer 2 dispatch"):
            torch.cuda._sleep(SLEEP_CYCLES)
            sent = streams.record()
        with streams.on(Role.COMPUTE, "F 0.0 layer 2 experts"):
            if not is_hidden:
                streams.wait(sent)
            torch.cuda._sleep(SLEEP_CYCLES)


@pytest.mark.parametrize(("is_hidden", "least", "most"), [(True, 0.9, 1.0), (False, 0.0, 0.1)])
def test_meter_and_profile_state_the_share_that_is_hidden(tmp_path, is_hidden, least, most):
    two_stages(is_hidden)
    meter = OverlapMeter()
    streams.set_observer(meter)
    two_stages(is_hidden)
    metered = meter.take_share()
    streams.set_observer(StageRanges())
    with torch.profiler.profile() as profiler:
        two_stages(is_hidden)
        torch.cuda.synchronize()
    streams.set_observer(None)
    path = tmp_path / "rank-0.json"
    profiler.export_chrome_trace(str(path))
    lines = [line.split() for line in report(read_spans(json.loads(path.read_text())["traceEvents"]))]
    print(f"hidden: by the meter {metered}, by the profile {lines}")
    assert least <= metered <= most
    assert [line[0] for line in lines] == ["communication", "dispatch", "all"]
    assert 100 * least <= float(lines[1][2].rstrip("%")) <= 100 * most


# What a run reports.

SIZES = (
    "--num-layers 2 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 "
    "--moe-ffn-hidden-size 768 --num-experts 32 --moe-router-topk 8 --micro-batch-size 4 --global-batch-size 16 "
    "--attention-dropout 0 --hidden-dropout 0 --init-device device "
)
"""A stage takes the device longer than the host takes to launch it; else the next one finds nothing to run beside."""
LEAST_HIDDEN = 0.3


def test_run_under_the_profiler_is_reported(start, tmp_path):
    window = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5 "
    streams.set_observer(StageRanges())
    flags = f"{SYMM_MEM.format(steps=5)}{SIZES}{window}--tensorboard-dir {tmp_path} "
    start(flags, [SwitchOn(delays_wgrad=True)], FAST)
    (path,) = tmp_path.glob("**/rank-0.json")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([str(path)]) == 0
    text = printed.getvalue()
    print(text)
    kinds = {line.split()[0]: line.split()[1:] for line in text.splitlines()[2:]}
    assert set(kinds) == {"dispatch", "combine", "all"}
    for time_ms, share in kinds.values():
        assert float(time_ms) > 0
        assert 0 <= float(share.rstrip("%")) <= 100
    # of all: a profiler slows the host, so that the short stages of one kind may find nothing to run beside
    assert float(kinds["all"][1].rstrip("%")) >= 100 * LEAST_HIDDEN
    kernels = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    named = {name: {k["tid"] for k in kernels if k["name"] == name} for name in SYMMETRIC_KERNELS}
    (comm,) = set().union(*named.values())
    assert all(named[name] for name in ("push_kernel", "wait_kernel", "expand_kernel", "reduce_kernel", "add_kernel"))
    assert comm not in {k["tid"] for k in kernels if any(part in k["name"] for part in GEMM)}


def test_share_is_logged_eagerly_and_not_under_a_graph(start):
    flags = SYMM_MEM.format(steps=8) + SIZES
    logs = [start(flags + graph, [SwitchOn(True), HiddenShare()], FAST)[1] for graph in ("", GRAPH)]
    shares = [
        [float(line.split("hidden communication:")[1].split()[0]) for line in log.splitlines() if "hidden comm" in line]
        for log in logs
    ]
    print(f"hidden share by step: eager {shares[0]}, around a graph {shares[1]}")
    assert len(shares[0]) >= 6
    assert all(0.0 <= share <= 1.0 for share in shares[0])
    assert statistics.median(shares[0]) >= LEAST_HIDDEN
    assert len(shares[1]) <= 4  # of the eager steps before the capture


def test_run_on_a_device_is_silent_under_the_stream_checker(start):
    flags = SYMM_MEM.format(steps=5) + DROPOUT["0.1"]
    run, log = start(f"{flags}--check-streams ", [SwitchOn(True)], FAST)
    assert "stream check: no findings" in log
    assert run.counters["pairs overlapped"] > 0


# Captured steps.


def hashes_of(start, flags, switches=()):
    """State hashes of a run by step, and what it counted."""
    run, log = start(flags, [Disturbances(), *switches])
    print(f"{len(switches)} switches, {flags[-60:]}: {dict(run.counters)}")
    return parse_state_hashes(log), run.counters


def test_overlap_trains_the_bits_of_the_plain_schedule(start):
    flags = CAPTURED + DROPOUT["0.1"]
    expected, _ = hashes_of(start, flags)
    assert {NUM_STEPS, HASH_INTERVAL} <= set(expected)
    assert hashes_of(start, flags)[0] == expected, "not deterministic: nothing can be compared"
    assert hashes_of(start, flags, [SwitchOn(True)])[0] == expected


@pytest.mark.parametrize("dropout", DROPOUT)
def test_captured_overlap_trains_the_bits_of_eager_steps_without_it(start, dropout):
    flags = CAPTURED + DROPOUT[dropout]
    expected, _ = hashes_of(start, flags)
    for delays_wgrad in (False, True):
        hashes, counters = hashes_of(start, flags + GRAPH, [SwitchOn(delays_wgrad)])
        assert hashes == expected, f"delays_wgrad={delays_wgrad}"
        assert counters["pairs overlapped"] > 0
        assert (counters["wgrads deferred"] > 0) == delays_wgrad
        assert counters["graph replays"] >= NUM_STEPS - 4
