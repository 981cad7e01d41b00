"""Which layers are in FP8."""

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fp8.layer_choice import config_of_layer, is_fp8_layer

SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "bf16": True, "fp8_recipe": "tensorwise"}


def test_first_and_last_layers_are_left_out():
    config = TransformerConfig(
        **SIZES,
        fp8="hybrid",
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=2,
        num_layers_at_end_in_bf16=1,
    )
    assert [is_fp8_layer(config, number) for number in (1, 2, 3, 4)] == [False, False, True, False]
    assert config_of_layer(config, 1).fp8 is None
    assert config_of_layer(config, 3) is config
    assert config.fp8 == "hybrid"


def test_all_layers_or_none_without_the_switch():
    config = TransformerConfig(**SIZES, fp8="e4m3", num_layers_at_start_in_bf16=4)
    assert all(is_fp8_layer(config, number) for number in (1, 4))
    assert not is_fp8_layer(TransformerConfig(**SIZES), 2)
