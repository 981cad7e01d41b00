"""The base class under the path that users of Megatron import, and the wrapper of half-precision models."""

from typing import Any

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.module_api.module import MegatronModule

__all__ = ["Float16Module", "MegatronModule"]


class Float16Module(MegatronModule):
    """Runs a model in bf16 or fp16 behind fp32 inputs and outputs.

    Parameters are cast. Buffers keep their dtype: a router's expert bias is fp32 and its token counts are integers,
    which half precision would round (bf16 has no odd number above 256).

    Raises: AssertionError if the configuration asks for no half precision.
    """

    def __init__(self, config: TransformerConfig, module: torch.nn.Module) -> None:
        super().__init__(config)
        assert config.bf16 or config.fp16, f"bf16={config.bf16}, fp16={config.fp16}: the wrapper needs one of them"
        self.dtype = torch.bfloat16 if config.bf16 else torch.float16
        for param in module.parameters():
            if param.is_floating_point():
                param.data = param.data.to(self.dtype)
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Cast fp32 inputs at the start of the model, and half-precision outputs to fp32 at its end."""
        if getattr(self.module, "pre_process", True):
            inputs, kwargs = _cast(inputs, torch.float32, self.dtype), _cast(kwargs, torch.float32, self.dtype)
        outputs = self.module(*inputs, **kwargs)
        return _cast(outputs, self.dtype, torch.float32) if getattr(self.module, "post_process", True) else outputs

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Hand the input of a chunk without embedding [s, b, h] on."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def global_name(self, local_name: str) -> str:
        """The wrapper adds no level to global names."""
        return local_name.removeprefix("module.")


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Cast every tensor of dtype `source` inside tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(target) if value.dtype == source else value
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, source, target) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, source, target) for key, item in value.items()}
    return value
