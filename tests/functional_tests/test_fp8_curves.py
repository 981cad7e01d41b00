"""200 steps on the shipped text in each FP8 recipe end where bf16 does, and those with a fault elsewhere."""

import math

import pytest
import torch

from megatron.core.fp8 import quantize
from megatron.core.fp8.layer_state import Fp8LayerState
from megatron.core.fp8.quantize import Quantized
from megatron.core.fp8.recipes import RECIPES
from tests.common.forked_run import run_ranks
from tests.common.mutants import replaced
from tests.functional_tests.cases import command_words, prepare_corpus
from tests.functional_tests.curves import CURVES, IN_FP8, LEARNED, ends_like, recorded_curve
from tests.functional_tests.golden import collect, end_of
from tests.functional_tests.run import compare_with_golden

DEADLINE_S = 560.0


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Losses of a case by step, {} if it broke off at a gradient that is not finite; runs it."""
    folder = tmp_path_factory.mktemp("curves")
    paths = {"DATA_PATH": str(prepare_corpus(folder)), "DATA_CACHE_PATH": str(folder / "cache")}

    def losses(name):
        (rank,) = run_ranks(1, command_words(CURVES[name].model_args, paths), DEADLINE_S)
        if rank.status:
            assert "--no-check-for-nan-in-loss-and-grad" in rank.output, rank.output[-3000:]
            return {}
        return collect(rank.output, CURVES[name].metrics)["lm loss"]

    return losses


@pytest.fixture(scope="session")
def curve(run):
    """Losses of a case by step; it runs once in a session."""
    known = {}

    def losses(name):
        if name not in known:
            known[name] = run(name)
        return known[name]

    return losses


def test_every_recipe_has_a_curve_of_200_steps():
    assert {case.model_args["--fp8-recipe"] for name, case in CURVES.items() if name in IN_FP8} == set(RECIPES)
    assert {case.model_args["--train-iters"] for case in CURVES.values()} == {200}


@pytest.mark.parametrize("name", IN_FP8)
def test_recorded_curve_ends_within_one_percent_of_bf16(name):
    assert ends_like(recorded_curve(name), recorded_curve("bf16"))
    assert recorded_curve(name) != recorded_curve("bf16")


@pytest.mark.full
@pytest.mark.parametrize("name", CURVES)
def test_curve_is_the_recorded_one(curve, name):
    """In all digits on the processor that recorded it, elsewhere by its end."""
    assert end_of(curve(name)) < LEARNED
    assert compare_with_golden(CURVES[name], {"lm loss": curve(name)}) == []


@pytest.mark.full
@pytest.mark.parametrize("name", IN_FP8)
def test_curve_ends_within_one_percent_of_bf16(curve, name):
    assert ends_like(curve(name), curve("bf16"))


def multiplied_by_factor(self, dtype=torch.float32):
    """`Quantized.dequantize` with the scale upside down."""
    turned = Quantized(self.codes, self.scale.reciprocal(), self.block)
    return (turned.codes.float() * quantize._expand(turned.scale, self.codes.shape, self.block)).to(dtype)


def factor_of_one(amax, *args, **kwargs):
    """No scaling: gradients are below the smallest code."""
    return amax.float() * 0 + 1


def first_amaxes_kept(self, amaxes):
    """The first step fills the history, no later one changes it."""
    if not self.amax_history.any():
        self.amax_history.copy_(amaxes.expand_as(self.amax_history))
    self.step_amax.zero_()


FAULTS = {
    "scale-upside-down": ("tensorwise", Quantized, "dequantize", multiplied_by_factor),
    "no-scale": ("tensorwise", quantize, "factor_of", factor_of_one),
    "first-amaxes-kept": ("delayed", Fp8LayerState, "apply_step_amaxes", first_amaxes_kept),
    "first-weights-kept": ("tensorwise", Fp8LayerState, "forget_weight", lambda self: None),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_curve_with_a_fault_ends_elsewhere(curve, run, fault):
    name, *seam = FAULTS[fault]
    with replaced(*seam):
        losses = run(name)
    assert all(math.isfinite(loss) for loss in curve("bf16").values())
    assert not ends_like(losses, curve("bf16"))
