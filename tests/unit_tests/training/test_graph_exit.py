"""Every way out of a run with captured steps: graphs are destroyed before the process groups, the exit code is right.

Two ranks through the stand-in for a capture. On a GPU tests/gpu_tests/test_graph_exit.py ends real graphs.
"""

import os
import signal
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from megatron.core import graph_state
from megatron.core.full_iteration_graph import FullIterationGraph
from megatron.core.full_iteration_graph.checks import CheckedRecording
from megatron.training import training
from megatron.training.guarded_steps import GuardedSteps
from tests.common.broken_ranks import start_broken_run
from tests.common.forked_run import wait_ranks
from tests.common.mutants import replaced

DEADLINE_S = 40.0
FAILURE = 70
"""Status of a rank that ends with a traceback."""


def interrupt(rank, step):
    if step == 5:
        os.kill(os.getpid(), signal.SIGTERM)


def fail(rank, step):
    if step == 5:
        raise ValueError("a step that fails")


def nothing(rank, step):
    pass


WAYS = {
    "end": ("--train-iters 5", nothing, 0, "counters"),
    "interval": ("--exit-interval 5", nothing, 0, "exiting program at iteration 5"),
    "signal": ("--exit-signal-handler", interrupt, 0, "exiting program after receiving SIGTERM"),
    "error": ("", fail, FAILURE, "a step that fails"),
}


def run(folder, flags, at_step):
    """Two ranks whose log says when graphs are destroyed and how many are left when the groups are."""
    destroy, leave = FullIterationGraph.destroy, dist.destroy_process_group

    def noted_destroy(graph):
        print("a graph is destroyed", flush=True)
        destroy(graph)

    def noted_leave(*groups):
        print(f"groups are destroyed, {graph_state.num_graphs()} graphs are left", flush=True)
        leave(*groups)

    with ExitStack() as stack:  # the ranks are forks of this process
        stack.enter_context(replaced(training, "build_guarded_steps", lambda run: GuardedSteps(run, CheckedRecording)))
        stack.enter_context(replaced(FullIterationGraph, "destroy", noted_destroy))
        stack.enter_context(replaced(dist, "destroy_process_group", noted_leave))
        children = start_broken_run(folder, flags, 2, at_step)
    return wait_ranks(children, folder, DEADLINE_S)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == "error" else pytest.mark.full) for way in WAYS])
def test_graphs_go_before_the_groups(tmp_path, way):
    flags, at_step, status, text = WAYS[way]
    ranks = run(tmp_path, flags, at_step)
    assert text in ranks[0].output
    for rank in ranks:
        assert rank.status == status, rank.output[-3000:]
        before, found, _ = rank.output.partition("groups are destroyed, 0 graphs are left")
        assert bool(found) == (status == 0), "a rank that fails leaves without a word to the others"
        assert "a graph is destroyed" in before
