"""Linear layer whose output features are split over the tensor-parallel ranks.

Legend: s sequence, b batch, i input features, o output features, tp ranks of the group.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.module_api.module import MegatronModule
from megatron.core.module_api.parameter import InitMethod, as_init_spec, new_parameter
from megatron.core.param_attrs import InitSpec, ParamAttrs
from megatron.core.tensor_parallel.partition import require_single_rank
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
        is_expert: The weight belongs to a routed expert and `tp_group` is the expert tensor-parallel group.
        is_embedding_or_output: The weight follows the decoupled learning rate.
        tp_group: Ranks that share the matrix; None for this rank alone.

    Raises: ConfigError if the group has more than one rank.
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
        require_single_rank(tp_group, type(self).__name__)
        self.input_size, self.output_size = input_size, output_size
        self.output_size_per_partition = divide(output_size, group_size(tp_group))
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

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply; return the output and, with `skip_bias_add`, the bias that is not in it.

        Shapes: input_ [..., i], weight [o/tp, i] -> [..., o/tp], bias [o/tp] or None.
        """
        used = self.weight if weight is None else weight
        assert used is not None, f"{type(self).__name__} [{self.output_size}, {self.input_size}] was given no weight"
        if self.skip_bias_add:
            return F.linear(input_, used), self.bias
        return F.linear(input_, used, self.bias), None
