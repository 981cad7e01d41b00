"""Which layers are in FP8."""

import copy

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fp8.recipes import recipe_spec


def is_fp8_layer(config: TransformerConfig, layer_number: int) -> bool:
    """True if the linear layers of decoder layer `layer_number`, counted from 1, are in FP8."""
    if config.fp8 is None or not config.first_last_layers_bf16:
        return config.fp8 is not None
    last = config.num_layers - config.num_layers_at_end_in_bf16
    return config.num_layers_at_start_in_bf16 < layer_number <= last


def config_of_layer(config: TransformerConfig, layer_number: int) -> TransformerConfig:
    """Return the configuration as the modules of this layer read it: without FP8 where the layer has none."""
    return config if config.fp8 is None or is_fp8_layer(config, layer_number) else _without_fp8(config)


def config_of_experts(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration as routed experts read it: without FP8 where the recipe does not cover them."""
    return config if config.fp8 is None or recipe_spec(config.fp8_recipe).covers_experts else _without_fp8(config)


def _without_fp8(config: TransformerConfig) -> TransformerConfig:
    without = copy.copy(config)
    without.fp8 = None
    return without
