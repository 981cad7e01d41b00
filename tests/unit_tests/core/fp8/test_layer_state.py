"""Delayed scaling: which amax a factor comes from, and when the history moves."""

import math

import pytest
import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.fp8.layer_state import GRADIENT, INPUT, Fp8LayerState, Fp8Setup, build_fp8_state
from megatron.core.fp8.plain_operand import factor_from_history
from megatron.core.fp8.recipes import FORWARD_DTYPE, RECIPES, gradient_dtype

ONE = torch.ones(1)


def state(**options) -> Fp8LayerState:
    return Fp8LayerState(Fp8Setup(RECIPES["delayed"], gradient_dtype("hybrid"), **options))


def factor(layer: Fp8LayerState, operand: int, values: torch.Tensor) -> torch.Tensor:
    """What values of an operand are multiplied by; their amax is noted."""
    dtype = layer.setup.gradient_dtype if operand == GRADIENT else FORWARD_DTYPE
    return factor_from_history(values, dtype, layer.history(operand))


def end_step(layer: Fp8LayerState) -> None:
    layer.apply_step_amaxes(layer.step_amaxes().clone())


def test_first_step_takes_the_present_amax_and_later_ones_the_last():
    layer = state()
    assert factor(layer, INPUT, 2 * ONE) == 224
    assert factor(layer, INPUT, 4 * ONE) == 112
    end_step(layer)
    assert factor(layer, INPUT, ONE) == 112
    assert factor(layer, GRADIENT, 2 * ONE) == 57344 / 2


def test_largest_of_the_history_is_forgotten_after_its_length():
    layer, factors = state(history_len=2, takes_largest=True), []
    for amax in (4.0, 1.0, 1.0, 1.0):
        factor(layer, INPUT, amax * ONE)
        end_step(layer)
        factors.append(float(factor(layer, INPUT, 0 * ONE)))
    assert factors == [112, 112, 448, 448]


def test_most_recent_ignores_older_entries():
    layer = state(history_len=3)
    for amax in (4.0, 1.0):
        factor(layer, INPUT, amax * ONE)
        end_step(layer)
    assert factor(layer, INPUT, ONE) == 448


def test_step_amax_is_the_largest_of_all_microbatches():
    layer = state()
    for amax in (1.0, 3.0, 2.0):
        factor(layer, INPUT, amax * ONE)
    assert layer.step_amaxes().tolist() == [3, 0, 0]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_amax_that_is_not_finite_leaves_the_history(bad):
    layer = state()
    factor(layer, INPUT, 2 * ONE)
    end_step(layer)
    factor(layer, INPUT, bad * ONE)
    end_step(layer)
    assert layer.step_amaxes().tolist() == [0, 0, 0]
    assert factor(layer, INPUT, ONE) == 224


def test_margin_leaves_a_part_of_the_range():
    assert factor(state(margin=1), INPUT, 2 * ONE) == 112


def test_history_is_saved_and_the_amax_of_a_step_is_not():
    layer, other = state(history_len=4), state(history_len=4)
    factor(layer, INPUT, 2 * ONE)
    end_step(layer)
    assert set(layer.state_dict()) == {"amax_history"}
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer.amax_history, other.amax_history)


def test_other_recipes_have_no_history():
    layer = Fp8LayerState(Fp8Setup(RECIPES["tensorwise"], gradient_dtype("e4m3")))
    assert layer.history(INPUT) is None
    assert layer.step_amaxes() is None
    assert not layer.state_dict()


def test_configuration_without_fp8_has_no_state():
    assert build_fp8_state(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)) is None


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    fields = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "bf16": True, "fp8": "hybrid"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"fp8_recipe='delayed': needs a GPU of compute capability 9.0, this one has"):
        build_fp8_state(TransformerConfig(**fields))
    assert build_fp8_state(TransformerConfig(**fields, device="cpu")) is not None
