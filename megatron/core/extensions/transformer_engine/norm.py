"""LayerNorm and RMSNorm of Transformer Engine, in place of `WrappedTorchNorm`."""

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.extensions.transformer_engine.module import EngineLayer
from megatron.core.param_attrs import InitSpec, ParamAttrs
from megatron.core.utils.device import resolve_device


def norm_attrs(config: TransformerConfig, prefix: str = "") -> dict[str, ParamAttrs]:
    """Attributes of a norm's parameters by the library's names; a norm sees a shard under sequence parallelism."""
    identity = InitSpec("zeros" if config.layernorm_zero_centered_gamma else "ones")
    inits = {f"{prefix}weight": identity, f"{prefix}bias": InitSpec("zeros")}
    return {name: ParamAttrs(init, sequence_parallel=config.sequence_parallel) for name, init in inits.items()}


class TENorm(EngineLayer):
    """Norm over the last dimension, with fp32 statistics; the configuration says which kind."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, num_gemms=0)
        pytorch = self.library.root.pytorch
        kind = pytorch.LayerNorm if config.normalization == "LayerNorm" else pytorch.RMSNorm
        engine = kind(
            hidden_size,
            eps=eps,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            device=resolve_device(config.device),
            dtype=config.params_dtype,
        )
        self.adopt(engine, norm_attrs(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., h] -> [..., h] in the dtype of the weight."""
        return self.engine(x)
