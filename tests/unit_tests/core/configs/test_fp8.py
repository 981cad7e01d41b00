"""Which layers are in FP8, and what is refused."""

import pytest

from megatron.core.configs.base import literal_choices
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.fp8.recipes import RECIPES

SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "bf16": True, "fp8_recipe": "tensorwise"}


@pytest.mark.parametrize(
    ("changes", "subject", "remedy"),
    [
        ({"fp8_margin": -1}, "fp8_margin=-1: from 0 to 15", "--fp8-margin to"),
        ({"fp8_amax_history_len": 0}, "fp8_amax_history_len=0: from 1 to 65536", "--fp8-amax-history-len to"),
        (
            {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 3},
            "num_layers=4 with num_layers_at_start_in_bf16=3, num_layers_at_end_in_bf16=1: no layer is left",
            "lower the counts",
        ),
        ({"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": -1}, "num_layers_at_start", "0 or more"),
        (
            {"device": "cuda", "hidden_size": 24},
            "hidden_size=24 with fp8='e4m3': FP8 products take 16",
            "multiple of 16",
        ),
        ({"device": "cuda", "ffn_hidden_size": 40}, "ffn_hidden_size=40 with fp8='e4m3': FP8", "multiple of 16"),
    ],
)
def test_refusals_name_field_value_and_remedy(changes, subject, remedy):
    with pytest.raises(ConfigError) as raised:
        TransformerConfig(**(SIZES | changes), fp8="e4m3")
    assert subject in str(raised.value)
    assert remedy in str(raised.value)


def test_any_width_goes_without_a_gpu():
    TransformerConfig(**(SIZES | {"device": "cpu", "hidden_size": 24}), fp8="e4m3")


def test_choices_on_the_command_line_are_the_registry():
    assert set(literal_choices(TransformerConfig)["fp8_recipe"]) == set(RECIPES)
