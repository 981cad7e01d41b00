"""Whole steps in FP8: captured (by the stand-in) and repeated ones are those of an eager run, with their histories."""

import pytest
import torch

from megatron.core.fp8 import layer_state
from megatron.core.fp8.layer_state import GRADIENT, INPUT, Fp8LayerState
from megatron.core.fp8.recipes import RECIPES
from megatron.training.callbacks.base import Callback
from tests.common.mutants import replaced
from tests.common.training_runs import assert_same_run

SHORT = "--train-iters 5 --global-batch-size 2 --eval-interval 3 --eval-iters 1 --cuda-graph-warmup-steps 2 "
DELAYED = "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max "
NUM_LAYERS = 4  # qkv, output projection, fc1 and fc2 of the experts


class Histories(Callback):
    """Amax histories [layers, length, 3] after each step, and how often weights were quantised in it."""

    def __init__(self):
        self.found, self.quantised, self._count, self._quantize = [], [], 0, layer_state.quantize_weight

    def quantize_weight(self, *args):
        self._count += 1
        return self._quantize(*args)

    def on_step_start(self, run):
        self._count = 0

    def on_step_end(self, run, result):
        states = [module for module in run.model[0].modules() if isinstance(module, Fp8LayerState)]
        self.found.append(torch.stack([state.amax_history.clone() for state in states]))
        self.quantised.append(self._count)
        left = torch.stack([state.step_amaxes() for state in states])
        assert not left[:, [INPUT, GRADIENT]].any(), f"step {run.state.iteration} left amaxes, or an evaluation in it"


def trained(start, flags, **options):
    """A run in delayed scaling: itself, its log, its histories."""
    histories = Histories()
    with replaced(layer_state, "quantize_weight", histories.quantize_weight):
        run, log = start(DELAYED + SHORT + flags, callbacks=[histories], **options)
    return run, log, histories


@pytest.mark.full
def test_captured_and_repeated_steps_train_as_eager_ones_in_fp8(start):
    _, eager, histories = trained(start, "")
    captured, log, same = trained(start, "", is_captured=True)
    assert_same_run(eager, log)
    assert captured.counters["graph replays"] >= 3
    budgets = "--moe-expert-rank-capacity-factor 0.5 "
    repeated, log, again = trained(start, budgets)
    assert_same_run(eager, log)
    assert repeated.counters["re-runs"] >= 5
    for other in (same, again):
        assert all(torch.equal(a, b) for a, b in zip(histories.found, other.found, strict=True))


def test_histories_move_once_a_step_and_weights_are_quantised_once(start):
    _, _, histories = trained(start, "")
    assert len(histories.found) == 5
    evaluation = NUM_LAYERS  # after the third step
    assert histories.quantised == [NUM_LAYERS, NUM_LAYERS, NUM_LAYERS + evaluation, NUM_LAYERS, NUM_LAYERS]
    for before, after in zip(histories.found, histories.found[1:], strict=False):
        assert torch.equal(after[:, 1:], before[:, :-1])
        assert bool((after[:, 0] > 0).all())


@pytest.mark.full
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "delayed"])
def test_captured_steps_of_every_recipe_train_as_eager_ones(start, recipe):
    flags = f"{SHORT}--bf16 --fp8-format e4m3 --fp8-recipe {recipe} "
    _, eager = start(flags)
    _, log = start(flags, is_captured=True)
    assert_same_run(eager, log)
