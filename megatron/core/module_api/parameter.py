"""Allocation of parameters: dtype and device from the configuration, attributes recorded at once."""

from collections.abc import Callable

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.param_attrs import InitSpec, ParamAttrs, set_param_attrs
from megatron.core.utils.device import resolve_device

InitMethod = InitSpec | Callable[[torch.Tensor], object]


def new_parameter(
    config: TransformerConfig,
    shape: tuple[int, ...],
    attrs: ParamAttrs,
    *,
    dtype: torch.dtype | None = None,
    allreduce: bool | None = None,
) -> torch.nn.Parameter:
    """Return an uninitialised parameter [*shape] of `config.params_dtype` on `config.device`; see `param_attrs`."""
    data = torch.empty(shape, dtype=dtype or config.params_dtype, device=resolve_device(config.device))
    return set_param_attrs(torch.nn.Parameter(data), attrs, allreduce)


def as_init_spec(init_method: InitMethod) -> InitSpec:
    """Return an init spec; a plain in-place initialiser, as Megatron users pass it, becomes one of kind `custom`."""
    return init_method if isinstance(init_method, InitSpec) else InitSpec("custom", function=init_method)


def hidden_init(config: TransformerConfig) -> InitSpec:
    """Return how matrices start that read the residual stream: `config.init_method`, else N(0, init_method_std)."""
    if config.init_method is not None:
        return as_init_spec(config.init_method)
    return InitSpec("normal", config.init_method_std)


def output_init(config: TransformerConfig) -> InitSpec:
    """Return how matrices start that write to the residual stream.

    `config.output_layer_init_method`, else N(0, init_method_std / sqrt(2 * num_layers)): two such matrices per layer
    add up, so that the variance of the stream does not grow with depth.
    """
    if config.output_layer_init_method is not None:
        return as_init_spec(config.output_layer_init_method)
    return InitSpec("normal", config.init_method_std / (2.0 * config.num_layers) ** 0.5)
