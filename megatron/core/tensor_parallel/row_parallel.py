"""Linear layer whose input features are split over the tensor-parallel ranks.

    rank 0   x0 -- A0 --+         forward   y = sum of x_r A_r^T; under sequence parallelism a rank keeps its rows
    rank 1   x1 -- A1 --+--> y    backward  dy is whole on every rank; under sequence parallelism it is gathered

Legend: s sequence, b batch, i input features, o output features, tp ranks of the group.
"""

import torch
import torch.distributed as dist

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fp8.layer_state import build_fp8_state
from megatron.core.fp8.linear import fp8_linear
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.parameter import InitMethod, as_init_spec, new_parameter
from megatron.core.param_attrs import InitSpec, ParamAttrs
from megatron.core.tensor_parallel.linear_autograd import row_parallel_linear
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_rank, group_size


class RowParallelLinear(MegatronModule):
    """Y = X A^T + b with A [o, i] cut along i: each rank adds one summand of Y, the bias is added once, after the sum.

    Args:
        init_method: Recipe of the whole matrix.
        input_is_parallel: The input holds this rank's features only, as a column-parallel layer leaves them.
        skip_bias_add: Return the bias beside the output, for a fused add later.
        is_expert: The weight belongs to a routed expert and `tp_group` is the expert tensor-parallel group. The layer
            then communicates nothing: its output is a summand, which the dispatcher adds to the others.
        tp_group: Ranks that share the matrix; None for this rank alone.

    Raises: ConfigError if the group does not divide the input size.
    """

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
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = divide(input_size, group_size(tp_group))
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.tp_group = tp_group
        self.is_sequence_parallel = config.sequence_parallel
        self.exchanges = group_size(tp_group) > 1 and not is_expert
        weight_attrs = ParamAttrs(
            as_init_spec(init_method),
            partition_dim=1,
            partition_rank=group_rank(tp_group),
            is_expert=is_expert,
            full_shape=(output_size, input_size),
        )
        bias_attrs = ParamAttrs(
            InitSpec("zeros"), is_expert=is_expert, sequence_parallel=config.sequence_parallel and not is_expert
        )
        self.weight = new_parameter(config, (output_size, self.input_size_per_partition), weight_attrs)
        self.bias = new_parameter(config, (output_size,), bias_attrs) if bias else None
        self.fp8 = build_fp8_state(config)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply; return the output and, with `skip_bias_add`, the bias that is not in it.

        Shapes: input_ [..., i/tp], or [..., i] without `input_is_parallel` -> [..., o], under sequence parallelism
            [s/tp, b, o]; bias [o] or None.
        """
        group = self.tp_group if self.exchanges else None
        fuses_wgrad = self.config.gradient_accumulation_fusion
        part = self._own_part(input_)
        if self.fp8 is None:
            output = row_parallel_linear(part, self.weight, group, self.is_sequence_parallel, fuses_wgrad)
        else:
            output = self._summed(fp8_linear(part, self.weight, self.fp8, fuses_wgrad))
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None

    def _own_part(self, input_: torch.Tensor) -> torch.Tensor:
        """Input features of this rank: [..., i/tp] or [..., i] -> [..., i/tp]."""
        if self.input_is_parallel or not self.exchanges:
            return input_
        return scatter_to_tensor_model_parallel_region(input_, self.tp_group)

    def _summed(self, output: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' parts: [..., o], under sequence parallelism [s, b, o] -> [s/tp, b, o]."""
        if not self.exchanges:
            return output
        if self.is_sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(output, self.tp_group)
        return reduce_from_tensor_model_parallel_region(output, self.tp_group)
