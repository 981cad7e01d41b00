"""Base class of the modules that carry a configuration.

Layers allocate their weights uninitialised. When the constructor of the *outermost* MegatronModule returns, the whole
tree below it is initialised at once, so that global names are known: a GPTModel is drawn by `decoder.layers.3...`, and
an MLP that a user builds by itself is ready as well.

    GPTModel(...)                      outermost: initialises everything below when it is done
      +- TransformerBlock(...)         inside another constructor: leaves the weights alone
           +- TransformerLayer(...)    likewise

Weights that already hold their values (a wrapper is built around a finished model) are not drawn again.
"""

from contextvars import ContextVar
from typing import Any

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.module_api.weight_init import initialize_weights
from megatron.core.tensor_parallel.random import get_base_seed

_INSIDE_CONSTRUCTOR: ContextVar[bool] = ContextVar("inside_constructor", default=False)


class InitializingType(type):
    """Metaclass that runs weight initialisation after the outermost constructor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct; then initialise, if no other MegatronModule is under construction in this context."""
        if _INSIDE_CONSTRUCTOR.get():
            return super().__call__(*args, **kwargs)
        token = _INSIDE_CONSTRUCTOR.set(True)
        try:
            module = super().__call__(*args, **kwargs)
        finally:
            _INSIDE_CONSTRUCTOR.reset(token)
        if module.config.perform_initialization:
            initialize_weights(module, get_base_seed(), module.config.init_device)
        return module


class MegatronModule(torch.nn.Module, metaclass=InitializingType):
    """A torch module with the configuration it was built from."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
