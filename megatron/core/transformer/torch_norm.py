"""The norm of the `local` implementation; the configuration says which kind."""

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fusions.fused_norm import layer_norm, rms_norm
from megatron.core.fusions.fused_rms_norm import NormRule, add_rms_norm, uses_norm_kernels
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.parameter import new_parameter
from megatron.core.param_attrs import InitSpec, ParamAttrs


class WrappedTorchNorm(MegatronModule):
    """LayerNorm or RMSNorm over the last dimension, with fp32 statistics; see `fusions/fused_norm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config)
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        identity = InitSpec("zeros" if self.zero_centered else "ones")
        shard = config.sequence_parallel
        self.weight = new_parameter(config, (hidden_size,), ParamAttrs(identity, sequence_parallel=shard))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = new_parameter(config, (hidden_size,), ParamAttrs(InitSpec("zeros"), sequence_parallel=shard))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., h] -> [..., h] in the dtype of the weight."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, self.zero_centered)
        return layer_norm(x, self.weight, self.bias, self.eps, self.zero_centered)

    def joins_stream(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> bool:
        """True if `with_stream` takes x and residual [..., h]."""
        return self.bias is None and uses_norm_kernels(x, self.weight, residual)

    def with_stream(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of x + residual and the sum itself, which goes on as the residual stream: [..., h] -> [..., h] twice.

        One kernel in each direction: the gradient of the stream joins that of the norm.
        """
        return add_rms_norm(x, residual, self.weight, NormRule(self.eps, float(self.zero_centered)))
