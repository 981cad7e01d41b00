"""Steps that the host reads once: the run that they replace, through the stand-in for a capture, overflows, NaN."""

import argparse
import gc

import pytest
import torch

import pretrain_gpt
from megatron.core import graph_state
from megatron.core.errors import ConfigError
from megatron.core.full_iteration_graph.checks import CaptureViolation
from megatron.training.callbacks.base import Callback
from megatron.training.guarded_steps import build_guarded_steps
from megatron.training.train_state import TrainingRun
from tests.common.training_runs import assert_same_run
from tools.run_metrics import parse_log, parse_state_hashes

LENGTH = "--train-iters 6 --global-batch-size 2 --eval-interval 3 --eval-iters 2 "


def test_captured_steps_train_as_eager_ones(start):
    flags = "--train-iters 4 --global-batch-size 2 --eval-interval 2 --eval-iters 1 --cuda-graph-warmup-steps 2 "
    _, eager = start(flags)
    captured, log = start(flags, is_captured=True)
    assert_same_run(eager, log)
    assert captured.counters["graph captures"] == 2
    assert captured.counters["graph replays"] == 5
    assert graph_state.num_graphs() == 0


def assert_every_step_is_repeated(start, flags, num_overflows):
    """With two budgets that are too small the run is that without one."""
    _, eager = start(flags)
    budgets = "--moe-expert-rank-capacity-factor 0.5 --moe-rank-capacity-tiers 0.7 "
    repeated, log = start(flags + budgets, is_captured=True)
    assert_same_run(eager, log)
    assert repeated.counters["row overflows"] == repeated.counters["re-runs"] == num_overflows
    assert set(parse_log(log)["row overflows"].values()) == {2.0}
    assert parse_log(log)["row head room (%)"][1] == -100.0
    assert "--moe-expert-rank-capacity-factor 1.05 holds it" in log


def test_repeated_steps_train_as_eager_ones(start):
    flags = "--train-iters 3 --global-batch-size 1 --eval-interval 3 --eval-iters 1 --cuda-graph-warmup-steps 2 "
    assert_every_step_is_repeated(start, flags, 2 * (3 + 3))


@pytest.mark.full
def test_repeated_replays_train_as_eager_ones(start):
    assert_every_step_is_repeated(start, LENGTH, 28)


def test_budget_that_holds_repeats_nothing(start):
    run, log = start(LENGTH + "--moe-expert-rank-capacity-factor 1.25 ")
    assert run.counters["re-runs"] == run.counters["row overflows"] == 0
    assert parse_log(log)["row head room (%)"][6] == 20.0


RAMP = "--rampup-batch-size 1 1 4 --global-batch-size 2 --train-iters 7 --eval-iters 0 --cuda-graph-warmup-steps 2 "


def test_ramp_of_batch_sizes_gets_a_graph_for_each_length(start):
    _, eager = start(RAMP)
    run, log = start(RAMP, is_captured=True)
    assert "dropped" not in log
    assert parse_state_hashes(eager) == parse_state_hashes(log)
    assert run.counters["graph captures"] == 2
    assert run.counters["graph replays"] == 5


class LateBuffer(Callback):
    """The model gets a buffer after its steps were captured."""

    def on_step_end(self, run, result):
        if run.state.iteration == 3:
            run.model[0].register_buffer("late", torch.zeros(1), persistent=False)


def test_buffer_that_appears_after_a_capture_ends_the_graphs(start):
    run, log = start(RAMP, is_captured=True, callbacks=[LateBuffer()])
    assert "the model has other buffers than its graphs know: they are dropped" in log
    assert (run.counters["graph captures"], run.counters["graph replays"]) == (2, 3)


class Weights(Callback):
    """Weights and optimizer state at the start of each step and at the end."""

    def __init__(self):
        self.found = []

    def on_step_start(self, run):
        tensors = [tensor for state in run.optimizer.named_state() for tensor in state.tensors.values()]
        self.found.append([tensor.clone() for tensor in [*run.model[0].parameters(), *tensors]])

    def on_train_end(self, run):
        self.on_step_start(run)


FAULTS = {"lm loss=nan": lambda output: output * float("nan"), "NaN or infinity in the gradient of decoder": None}


def failing_forward_step(at, fault):
    """A forward step with a fault in microbatch `at`: of the loss, or else of its gradient alone."""
    calls = []

    def forward_step(data_iterator, model):
        output, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        calls.append(1)
        if len(calls) == at and fault is None:
            output.register_hook(lambda grad: grad * float("nan"))
        elif len(calls) == at:
            output = fault(output)
        return output, loss_func

    return forward_step


@pytest.mark.parametrize("text", FAULTS)
def test_step_that_is_not_finite_stops_the_run_and_changes_nothing(start, text):
    length = "--global-batch-size 2 --train-iters 5 --eval-iters 0 --moe-expert-rank-capacity-factor 1.2 "
    weights = Weights()
    with pytest.raises(RuntimeError, match=text):
        start(length, callbacks=[weights], forward_step=failing_forward_step(5, FAULTS[text]))
    *_, before, after = weights.found
    assert len(weights.found) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Poisoned(Weights):
    """A weight becomes NaN before the fifth step, which is a replay."""

    def on_step_start(self, run):
        if run.state.iteration == 4:
            with torch.no_grad():
                next(run.model[0].parameters()).fill_(float("nan"))
        super().on_step_start(run)


def test_replay_that_is_not_finite_stops_the_run_and_changes_nothing(start):
    weights = Poisoned()
    with pytest.raises(RuntimeError, match=r"iteration 5: lm loss=nan"):
        start("--global-batch-size 2 --train-iters 8 --eval-iters 0 ", is_captured=True, callbacks=[weights])
    *_, before, after = weights.found
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))


class LivingTensors(Callback):
    """How many tensors live after each step."""

    def __init__(self):
        self.counts = []

    def on_step_end(self, run, result):
        gc.collect()
        self.counts.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))


@pytest.mark.full
def test_replays_that_overflow_leave_no_tensor_behind(start):
    living = LivingTensors()
    budgets = "--moe-expert-rank-capacity-factor 0.5 --moe-rank-capacity-tiers 0.7 "
    start(budgets + "--global-batch-size 1 --train-iters 9 --eval-iters 0 ", is_captured=True, callbacks=[living])
    assert living.counts[5] == living.counts[8]


def test_change_of_the_work_is_found_by_the_stand_in(start):
    def forward_step(data_iterator, model, calls=[]):  # noqa: B006  counts over the run
        calls.append(1)
        output, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        return (output * 1.0 if len(calls) > 12 else output), loss_func

    with pytest.raises(CaptureViolation, match=r"test_guarded_steps.py:\d+: operation \d+ is aten.mul"):
        start("--train-iters 8 --global-batch-size 2 --eval-iters 0", is_captured=True, forward_step=forward_step)


def test_capture_without_a_gpu_is_refused_by_its_flag():
    config = argparse.Namespace(num_moe_experts=None, captures_iteration=True)
    run = TrainingRun(None, [], None, None, config, None, torch.device("cpu"), None)
    with pytest.raises(ConfigError, match=r"cuda_graph_impl='full_iteration' with device='cpu': .* none"):
        build_guarded_steps(run)
