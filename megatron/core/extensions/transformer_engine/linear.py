"""Linear layers of a decoder layer: column-parallel, row-parallel, and a norm with a column-parallel layer behind it.

They take the arguments of `ColumnParallelLinear` and `RowParallelLinear` and have parameters of the same names, so that
specs, checkpoints and initial weights are the same. The library does the tensor-parallel communication, gather and
reduce-scatter under sequence parallelism included. Biases are added here: the library would hand their gradients over
together with a delayed weight gradient, or not, by precision.

Legend: s sequence, b batch, i input features, o output features, tp ranks of the group.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.extensions.transformer_engine.module import EngineLayer
from megatron.core.extensions.transformer_engine.norm import norm_attrs
from megatron.core.module_api.parameter import InitMethod, as_init_spec, new_parameter
from megatron.core.param_attrs import InitSpec, ParamAttrs
from megatron.core.tensor_parallel.recompute import recomputes
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_rank, group_size


class TEColumnParallelLinear(EngineLayer):
    """Y = X A^T + b with A [o, i] cut along o; arguments as for `ColumnParallelLinear`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config)
        assert not gather_output, "gather_output=True: a decoder layer keeps its columns apart"
        self.is_expert = is_expert
        self.skip_bias_add, self.exchanges = skip_bias_add, group_size(tp_group) > 1 and not is_expert
        place: dict[str, Any] = {"partition_dim": 0, "num_parts": stride, "partition_rank": group_rank(tp_group)}
        weight = ParamAttrs(
            as_init_spec(init_method), is_expert=is_expert, full_shape=(output_size, input_size), **place
        )
        own_size = stride * divide(output_size // stride, group_size(tp_group))
        sizes = (input_size, output_size if self.exchanges else own_size)
        self.adopt(self._build_engine(*sizes, tp_group), {"weight": weight, **norm_attrs(config, "layer_norm_")})
        self.bias = None
        if bias:
            attrs = ParamAttrs(InitSpec("zeros"), is_expert=is_expert, full_shape=(output_size,), **place)
            self.bias = new_parameter(config, (own_size,), attrs)

    def _build_engine(self, input_size: int, output_size: int, tp_group: dist.ProcessGroup | None) -> Any:
        """Return the library's module; the sizes are those of the whole matrix if it communicates."""
        arguments = self.common_arguments() | _parallel_arguments(self, tp_group, "column")
        if not self.is_expert and _keeps_original(self, "layernorm"):
            arguments["save_original_input"] = True
        return self.library.root.pytorch.Linear(input_size, output_size, **arguments)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply; return the output and, with `skip_bias_add`, the bias that is not in it.

        Shapes: input_ [..., i], under sequence parallelism [s/tp, b, i] -> [..., o/tp], bias [o/tp] or None.
        """
        output = self.run_padded(input_)
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    """Norm and column-parallel layer in one: no copy of the norm's result in high precision in FP8."""

    def _build_engine(self, input_size: int, output_size: int, tp_group: dist.ProcessGroup | None) -> Any:
        config = self.config
        arguments = self.common_arguments() | _parallel_arguments(self, tp_group, "column")
        return self.library.root.pytorch.LayerNormLinear(
            input_size,
            output_size,
            eps=config.layernorm_epsilon,
            normalization=config.normalization,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            **arguments,
        )


class TERowParallelLinear(EngineLayer):
    """Y = X A^T + b with A [o, i] cut along i; arguments as for `RowParallelLinear`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config)
        assert input_is_parallel, "input_is_parallel=False: a decoder layer leaves its columns apart"
        self.skip_bias_add, self.exchanges = skip_bias_add, group_size(tp_group) > 1 and not is_expert
        weight = ParamAttrs(
            as_init_spec(init_method),
            partition_dim=1,
            partition_rank=group_rank(tp_group),
            is_expert=is_expert,
            full_shape=(output_size, input_size),
        )
        own_size = divide(input_size, group_size(tp_group))
        arguments = self.common_arguments() | _parallel_arguments(self, tp_group, "row")
        if is_expert and _keeps_original(self, "moe_act"):
            arguments["save_original_input"] = True
        engine = self.library.root.pytorch.Linear(input_size if self.exchanges else own_size, output_size, **arguments)
        self.adopt(engine, {"weight": weight})
        self.bias = None
        if bias:
            is_sharded = config.sequence_parallel and not is_expert
            attrs = ParamAttrs(InitSpec("zeros"), is_expert=is_expert, sequence_parallel=is_sharded)
            self.bias = new_parameter(config, (output_size,), attrs)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply; return the output and, with `skip_bias_add`, the bias that is not in it.

        Shapes: input_ [..., i/tp] -> [..., o], under sequence parallelism [s/tp, b, o]; bias [o] or None.
        """
        output = self.run_padded(input_)
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None


def _parallel_arguments(layer: Any, tp_group: dist.ProcessGroup | None, mode: str) -> dict[str, Any]:
    """Arguments for the library's own communication; none if the layer does not communicate."""
    if not layer.exchanges:
        return {}
    return {
        "tp_group": tp_group,
        "tp_size": group_size(tp_group),
        "parallel_mode": mode,
        "sequence_parallel": layer.config.sequence_parallel,
    }


def _keeps_original(layer: EngineLayer, module: Any) -> bool:
    """True if codes of the input should be made again in backward: recompute of `module` makes the input again."""
    has_codes = layer.fp8 is not None and not layer.fp8.setup.recipe.uses_history
    return has_codes and recomputes(layer.config, module) and layer.library.has("save_original_input")
