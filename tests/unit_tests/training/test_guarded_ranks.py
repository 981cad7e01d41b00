"""Captured steps of several ranks, through the stand-in for a capture: the state of the eager run after every step.

Expert parallel with and without overlap, and pipeline stages: what they exchange is part of the captured step.
"""

import pytest

from megatron.core import graph_state
from megatron.core.full_iteration_graph import FullIterationGraph
from megatron.core.full_iteration_graph.checks import CheckedRecording
from megatron.core.utils.collectives import warm_up
from megatron.training import guarded_steps, training
from megatron.training.callbacks.base import Callback
from megatron.training.guarded_steps import GuardedSteps, build_guarded_steps
from megatron.training.state_hash import state_hash
from tests.common.mutants import replaced
from tests.common.skewed_steps import SkewedSteps
from tests.common.stream_runs import TINY_MOE, train

STEPS = (
    "--train-iters 4 --global-batch-size 4 --cuda-graph-warmup-steps 2 --moe-router-enable-expert-bias "
    "--attention-dropout 0.1 --hidden-dropout 0.1 "
    "--moe-router-score-function sigmoid --moe-aux-loss-coeff 0.01 --use-distributed-optimizer"
)
DROP_PAD = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
BUDGET = "--moe-expert-rank-capacity-factor 2.0"
TIGHT = "--moe-expert-rank-capacity-factor 0.6 --moe-rank-capacity-tiers 0.8"
HYBRIDEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
OVERLAP = "--overlap-moe-expert-parallel-comm"
DELAY = f"{OVERLAP} --delay-wgrad-compute"
PP2 = "--expert-model-parallel-size 1 --pipeline-model-parallel-size 2 --num-layers 4 --moe-layer-freq [0,1,1,1]"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"


class Figures(Callback):
    """State, losses and gradient norm after each step."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, run, result):
        self.steps.append((state_hash(run.model, run.optimizer), result.losses, result.grad_norm))


def run_job(flags, is_captured, skewed=()):
    """Body of a rank: figures of all steps, counters, graphs that are left; in `skewed` steps one rank gets all."""
    figures = Figures()

    def build(run):
        return GuardedSteps(run, CheckedRecording) if is_captured else build_guarded_steps(run)

    with replaced(training, "build_guarded_steps", build):
        run = train([*TINY_MOE, *STEPS.split(), *flags.split()], [SkewedSteps(skewed), figures])
    return figures.steps, dict(run.counters), graph_state.num_graphs()


def compare(pool, common, captured_only="", world_size=2, skewed=(), num_steps=4):
    """Run eagerly and captured; returns the counters of the captured run."""
    eager = pool.run(run_job, common, False, skewed, world_size=world_size)
    captured = pool.run(run_job, f"{common} {captured_only}", True, skewed, world_size=world_size)
    for (expected, *_), (got, counters, num_left) in zip(eager, captured, strict=True):
        assert got == expected
        assert len(got) == num_steps
        assert counters["graph captures"] >= 1
        assert counters["graph replays"] >= 2
        assert num_left == 0
    return captured[0][1]


def test_expert_ranks_replay_what_they_do_eagerly(pool):
    counters = compare(pool, f"{HYBRIDEP} {DELAY}", BUDGET)
    assert counters["re-runs"] == 0
    assert counters["pairs overlapped"] > 0


def test_stages_replay_what_they_do_eagerly(pool):
    compare(pool, VPP2)


@pytest.mark.full
@pytest.mark.parametrize("dispatcher", ["", HYBRIDEP], ids=["alltoall", "hybridep"])
def test_chosen_steps_overflow_and_the_graph_survives(pool, dispatcher):
    budget = "--moe-expert-rank-capacity-factor 1.8"
    counters = compare(pool, f"{dispatcher} --train-iters 7", budget, skewed=(4, 6), num_steps=7)
    assert (counters["row overflows"], counters["re-runs"]) == (2, 2)
    assert (counters["graph captures"], counters["graph replays"]) == (1, 5)


@pytest.mark.full
@pytest.mark.parametrize("overlap", ["", OVERLAP, DELAY], ids=["serial", "overlap", "delayed"])
@pytest.mark.parametrize(
    ("common", "captured_only"),
    [(DROP_PAD, ""), ("", BUDGET), ("", TIGHT), (HYBRIDEP, BUDGET), (HYBRIDEP, TIGHT)],
    ids=["drop-pad", "budget", "overflows", "hybridep", "hybridep-overflows"],
)
def test_expert_ranks_replay_every_form(pool, common, captured_only, overlap):
    counters = compare(pool, f"{common} {overlap}", captured_only)
    assert (counters["re-runs"] > 0) == (captured_only == TIGHT)
    assert (counters.get("pairs overlapped", 0) > 0) == bool(overlap)


@pytest.mark.full
@pytest.mark.parametrize("stages", [PP2, VPP2], ids=["pp2", "vpp2"])
@pytest.mark.parametrize("captured_only", ["", TIGHT], ids=["exact", "overflows"])
def test_stages_replay_every_form(pool, stages, captured_only):
    counters = compare(pool, stages, captured_only)
    assert (counters["re-runs"] > 0) == bool(captured_only)


CP2 = "--context-parallel-size 2 --attention-dropout 0"
LAYOUTS = {
    "data parallel": "--expert-model-parallel-size 1 --overlap-grad-reduce --overlap-param-gather",
    "tensor parallel": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 1 "
    "--expert-tensor-parallel-size 1",
    "context parallel": CP2,
    "context parallel, all keys": f"{CP2} --cp-comm-type all_gather",
    "context parallel, all heads": f"{CP2} --cp-comm-type a2a",
    "context parallel, masks": f"{CP2} --reset-attention-mask --reset-position-ids --eod-mask-loss",
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_replay_what_they_do_eagerly(pool, layout):
    compare(pool, LAYOUTS[layout], BUDGET)


class UsedGroups:
    """Every group of the run was used once before its first capture: NCCL could not make a communicator inside."""

    def __init__(self):
        self.warmed = []

    def __call__(self, groups, device):
        groups = list(groups)
        warm_up(groups, device)
        self.warmed += groups


def warmed_job(flags):
    """Body of a rank: groups that were warmed, all groups of the run, and captures before the first warming."""
    used, before = UsedGroups(), []

    def capture(graph):
        before.append(len(used.warmed))
        plain_capture(graph)

    plain_capture, known = FullIterationGraph.capture, []

    class Known(Callback):
        def on_train_start(self, run):
            known.extend(run.pg_collection.all_groups())

    def build(run):
        return GuardedSteps(run, CheckedRecording)

    with (
        replaced(training, "build_guarded_steps", build),
        replaced(guarded_steps, "warm_up", used),
        replaced(FullIterationGraph, "capture", capture),
    ):
        train([*TINY_MOE, *STEPS.split(), *flags.split()], [Known()])
    return before, len(set(used.warmed)), len(set(known))


def test_every_group_is_used_before_the_first_capture(pool):
    for before, num_warmed, num_known in pool.run(warmed_job, BUDGET):
        assert before == [num_known]
        assert num_warmed == num_known > 1


@pytest.mark.full
def test_experts_and_stages_together(pool):
    both = f"{VPP2} --expert-model-parallel-size 2 --global-batch-size 8 {DELAY}"
    counters = compare(pool, both, BUDGET, world_size=4)
    assert counters["pairs overlapped"] > 0
