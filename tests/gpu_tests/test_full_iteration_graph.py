"""Captured steps beside eager ones: equal by the hash of the whole state, through saves, evaluations and overflows.

All runs of one GPU are in this process, in --deterministic-mode. The hash goes through the host, so it is taken every
few steps; a difference in one step stays in all later ones.
"""

import time

import pytest
import torch

from megatron.core import graph_state
from megatron.core.full_iteration_graph import FullIterationGraph
from megatron.training.callbacks.base import Callback
from tests.common.captured_runs import DROP_PAD, DROPOUT, GRAPH, MODEL, Disturbances, SwitchOn, assert_equal_runs
from tests.common.mutants import replaced
from tests.common.snapshot import diff, snapshot
from tests.functional_tests.cases import run_python, torchrun_words
from tools.run_metrics import parse_state_hashes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

FORMS = {
    "drop-pad": (DROP_PAD, ""),
    "dropless": ("", ""),
    "dropless-budget": ("", "--moe-expert-rank-capacity-factor 1.2 "),
    "hybridep": (
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine symm_mem ",
        "--moe-expert-rank-capacity-factor 1.2 ",
    ),
}
"""Name -> flags of both runs, flags of the captured one."""
WAYS = {"plain": [], "overlap": [SwitchOn(False)], "delayed": [SwitchOn(True)]}
CASES = [(form, "plain") for form in FORMS]
CASES += [(form, way) for form in ("drop-pad", "hybridep") for way in ("overlap", "delayed")]
NUM_STEPS = 110  # 3 eager, 107 replays
HUNDRED = f"--train-iters {NUM_STEPS} --log-interval 10 --eval-interval 25 --save-interval 40 "
EAGER_LOGS: dict[str, str] = {}
"""Logs of eager runs by their flags; several tests compare with one run."""
OVERLAPPED = ("pairs overlapped", "wgrads deferred")
EXIT_LIMIT_S = 60.0


class CaptureWatch(Callback):
    """Compares the whole state before and after each capture."""

    def __init__(self):
        self.differences, self.run = [], None

    def on_step_start(self, run):
        self.run = run

    def watched(self, capture):
        def wrapper(graph):
            state = {
                "model": self.run.model,
                "optimizer": self.run.optimizer,
                "scheduler": self.run.scheduler,
                "plain_tensors": ["inv_freq"],
            }
            before = snapshot(**state)
            capture(graph)
            self.differences.append(diff(before, snapshot(**state)))

        return wrapper


@pytest.mark.parametrize("dropout", DROPOUT)
@pytest.mark.parametrize(("form", "way"), CASES)
def test_hundred_replays_equal_hundred_eager_steps(start, tmp_path, form, way, dropout):
    common, captured_only = FORMS[form]
    eager = DROPOUT[dropout] + HUNDRED + common
    if eager not in EAGER_LOGS:
        EAGER_LOGS[eager] = start(eager + f"--save {tmp_path / 'eager'}", [Disturbances()])[1]
    watch = CaptureWatch()
    with replaced(FullIterationGraph, "capture", watch.watched(FullIterationGraph.capture)):
        flags = f"{eager}{captured_only}--save {tmp_path / 'graph'} {GRAPH}"
        run, graph_log = start(flags, [Disturbances(), watch, *WAYS[way]])
    print({name: run.counters[name] for name in ("graph captures", "graph replays", "re-runs", *OVERLAPPED)})
    assert [run.counters[name] > 0 for name in OVERLAPPED] == [way != "plain", way == "delayed"]
    assert_equal_runs(EAGER_LOGS[eager], graph_log, NUM_STEPS // 10 + 1)
    assert run.counters["graph captures"] == 2
    assert run.counters["graph replays"] >= 100
    assert graph_state.num_graphs() == 0
    assert watch.differences == [{}, {}], "a capture left a trace"


def test_eager_runs_are_repeatable(start):
    flags = f"{DROPOUT['0.1']}--train-iters 10 --log-interval 5 "
    assert_equal_runs(start(flags)[1], start(flags)[1], 3)


def test_resume_with_a_graph_continues_the_run_without_one(start, tmp_path):
    flags = f"{DROPOUT['0.1']}--train-iters 16 "
    straight = parse_state_hashes(start(flags)[1])
    start(flags + GRAPH + f"--save {tmp_path} --save-interval 8 --exit-interval 8")
    _, log = start(flags + GRAPH + f"--load {tmp_path}")
    resumed = parse_state_hashes(log)
    print("straight", straight)
    print("resumed", resumed)
    assert resumed == {step: straight[step] for step in range(9, 17)}


OVERFLOWING = {
    "exact": "--moe-expert-rank-capacity-factor 0.5 ",
    "tiers": "--moe-expert-rank-capacity-factor 0.5 --moe-rank-capacity-tiers 0.7 1.0 ",
}


@pytest.mark.parametrize("budgets", OVERFLOWING)
def test_every_step_overflows_and_the_run_is_that_without_budgets(start, budgets):
    flags = f"{DROPOUT['0.1']}--train-iters 30 --eval-interval 10 --log-interval 5 "
    _, eager_log = start(flags)
    run, log = start(flags + GRAPH + OVERFLOWING[budgets], [Disturbances()])
    print(dict(run.counters))
    assert_equal_runs(eager_log, log, 7)
    assert run.counters["row overflows"] >= 30
    assert run.counters["graph captures"] <= (2 if budgets == "exact" else 6)


class Reserved(Callback):
    """Memory in use and reserved after each step, MiB, and captures so far."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, run, result):
        memory = torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20
        self.seen.append((*memory, run.counters["graph captures"], run.counters["row overflows"]))


def test_two_hundred_overflows_take_no_more_memory(start):
    """Every step is a replay that overflows and an eager step in the memory of the graph."""
    memory = Reserved()
    flags = "--train-iters 200 --log-interval 50 --eval-iters 0 --moe-expert-rank-capacity-factor 0.5 "
    plain = MODEL.replace("--deterministic-mode --log-state-hash", "").replace("--log-num-zeros-in-grad", "")
    start(DROPOUT["0.1"] + flags + GRAPH, [memory], plain)
    early, last = memory.seen[19], memory.seen[-1]
    print(f"MiB in use, MiB reserved, captures, overflows: step 20 {early}, step 200 {last}")
    assert early[:3] == last[:3]
    assert (last[2], last[3]) == (1, 200)


def test_skipped_steps_of_a_loss_scale_are_equal(start):
    scale = "--fp16 --initial-loss-scale 4294967296 --hysteresis 1 --loss-scale-window 5 "
    flags = DROP_PAD + DROPOUT["0"] + scale + "--train-iters 30 "
    half = MODEL.replace("--bf16 ", "")
    eager, eager_log = start(flags, model=half)
    graph, graph_log = start(flags + GRAPH, model=half)
    assert eager.counters["skipped steps"] == graph.counters["skipped steps"] > 0
    assert parse_state_hashes(eager_log) == parse_state_hashes(graph_log)


# Two GPUs: NCCL collectives inside the graph.

EP2 = "--expert-model-parallel-size 2 "


def launch(flags, num_processes=2):
    """Run pretrain_gpt.py on its own; returns its log and the seconds that it took."""
    begin = time.monotonic()
    log = run_python([*torchrun_words(num_processes), "pretrain_gpt.py", *(MODEL + flags).split()])
    return log, time.monotonic() - begin


@TWO_GPUS
@pytest.mark.parametrize("form", ["drop-pad", "dropless-budget"])
def test_two_gpus_replay_what_they_do_eagerly(form):
    flags = EP2 + DROPOUT["0.1"] + "--train-iters 53 --eval-interval 20 "
    common, captured_only = FORMS[form]
    eager_log, _ = launch(flags + common)
    graph_log, seconds = launch(f"{flags}{common}{captured_only.replace('1.2', '1.6')}{GRAPH}")
    print(
        f"{form}: {seconds:.0f} s;", [line for line in graph_log.splitlines() if "counters" in line or "rows:" in line]
    )
    assert_equal_runs(eager_log, graph_log, 53)


@TWO_GPUS
def test_two_gpus_survive_overflows_bit_for_bit():
    flags = EP2 + DROPOUT["0.1"] + "--train-iters 30 --eval-interval 10 "
    eager_log, _ = launch(flags)
    graph_log, _ = launch(flags + GRAPH + "--moe-expert-rank-capacity-factor 1.02 ")
    print([line for line in graph_log.splitlines() if "counters" in line or "overflow" in line or "rows:" in line])
    assert "row overflow 1" in graph_log
    assert_equal_runs(eager_log, graph_log, 30)


@TWO_GPUS
def test_run_ends_by_exit_interval_within_seconds():
    log, seconds = launch(EP2 + DROP_PAD + DROPOUT["0"] + GRAPH + "--train-iters 50 --exit-interval 12 ")
    assert "exiting program at iteration 12" in log
    assert seconds < EXIT_LIMIT_S


@TWO_GPUS
def test_run_ends_by_an_error_within_seconds():
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"exit code [1-9].*"):
        launch(EP2 + DROP_PAD + DROPOUT["0"] + GRAPH + "--train-iters 50 --lr 1e30 --clip-grad 0 ")
    assert time.monotonic() - begin < EXIT_LIMIT_S
