"""The table of recipes."""

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.fp8.recipes import RECIPES, gradient_dtype, recipe_spec


def test_unknown_recipe_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="fp8_recipe='foo': not a recipe of this tree; choose one of delayed, tens"):
        recipe_spec("foo")


def test_only_hybrid_gradients_have_the_wider_range():
    assert gradient_dtype("hybrid") == torch.float8_e5m2
    assert gradient_dtype("e4m3") == torch.float8_e4m3fn


def test_only_delayed_scaling_keeps_state():
    assert [name for name, spec in RECIPES.items() if spec.uses_history] == ["delayed"]
