"""Linear layer whose output features are split over the tensor-parallel ranks.

    rank 0   x --+-- A0 --> y0        forward   x is whole on every rank; under sequence parallelism it is gathered
    rank 1   x --+-- A1 --> y1        backward  dx = sum of dy_r A_r; under sequence parallelism a rank keeps its rows

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
from megatron.core.tensor_parallel.linear_autograd import column_parallel_linear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_rank, group_size


class ColumnParallelLinear(MegatronModule):
    """Y = X A^T + b with A [o, i] cut along o, so that each rank computes its own columns of Y.

    Args:
        init_method: Recipe of the whole matrix.
        gather_output: Return all columns on every rank instead of this rank's.
        stride: Equal parts of the output that are cut one by one (2 for [gate; up]).
        skip_bias_add: Return the bias beside the output, for a fused add later.
        skip_weight_param_allocation: Own no weight; `forward` is given one (tied output layer).
        is_expert: The weight belongs to a routed expert and `tp_group` is the expert tensor-parallel group. The layer
            then communicates nothing: the dispatcher brings the tokens and sums the results.
        is_embedding_or_output: The weight follows the decoupled learning rate.
        tp_group: Ranks that share the matrix; None for this rank alone.

    Raises: ConfigError if the group does not divide the output size.
    """

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
        skip_weight_param_allocation: bool = False,
        is_expert: bool = False,
        is_embedding_or_output: bool = False,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config)
        self.input_size, self.output_size = input_size, output_size
        self.output_size_per_partition = stride * divide(output_size // stride, group_size(tp_group))
        self.is_sequence_parallel = config.sequence_parallel
        self.exchanges = group_size(tp_group) > 1 and not is_expert
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.tp_group = tp_group

        def allocate(init: InitSpec, width: tuple[int, ...]) -> torch.nn.Parameter:
            attrs = ParamAttrs(
                init,
                partition_dim=0,
                num_parts=stride,
                partition_rank=group_rank(tp_group),
                is_expert=is_expert,
                is_embedding_or_output=is_embedding_or_output,
                full_shape=(output_size, *width),
            )
            return new_parameter(config, (self.output_size_per_partition, *width), attrs)

        self.weight = None if skip_weight_param_allocation else allocate(as_init_spec(init_method), (input_size,))
        self.bias = allocate(InitSpec("zeros"), ()) if bias else None
        self.fp8 = None if is_embedding_or_output else build_fp8_state(config)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply; return the output and, with `skip_bias_add`, the bias that is not in it.

        Shapes: input_ [..., i], under sequence parallelism [s/tp, b, i]; weight [o/tp, i]
            -> [..., o/tp] (with `gather_output` [..., o]), bias [o/tp] or None.
        """
        used = self.weight if weight is None else weight
        assert used is not None, f"{type(self).__name__} [{self.output_size}, {self.input_size}] was given no weight"
        added, returned = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        group = self.tp_group if self.exchanges else None
        fuses_wgrad = self.config.gradient_accumulation_fusion
        if self.fp8 is None:
            output = column_parallel_linear(input_, used, added, group, self.is_sequence_parallel, fuses_wgrad)
        else:
            output = fp8_linear(self._whole_input(input_), used, self.fp8, fuses_wgrad)
            output = output if added is None else output + added
        if self.exchanges and self.gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output, returned

    def _whole_input(self, input_: torch.Tensor) -> torch.Tensor:
        """All tokens of the group, gradients summed over it: [..., i], or [s/tp, b, i] -> [s, b, i]."""
        if not self.exchanges:
            return input_
        if self.is_sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(input_, self.tp_group)
