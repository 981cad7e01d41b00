"""The factor and the operation with which gradients are reduced over the replicas of a parameter.

Let R = DP * CP, the number of ranks that see different tokens. A dense parameter has R replicas. An expert has EDP of
them, and each has already received the tokens of the other R / EDP ranks through the dispatcher, so its gradient is a
sum over those; dividing by R gives the same mean as for a dense parameter.

    mode                   dense           expert
    default                1/R, SUM        1/R, SUM over EDP
    average in collective  1, AVG          EDP/R, AVG over EDP
    per-token loss         1, SUM          1, SUM over EDP       (the finaliser divides by the token count)
"""

from dataclasses import dataclass

import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.utils.collectives import AVG, SUM


@dataclass(frozen=True)
class GradReduction:
    """Multiply by `factor`, then reduce with `op`."""

    factor: float
    op: dist.ReduceOp.RedOpType


def grad_reduction(
    *, is_expert: bool, dp_cp_size: int, expt_dp_size: int, per_token_loss: bool, average_in_collective: bool
) -> GradReduction:
    """Look up the table above."""
    if per_token_loss and average_in_collective:
        raise ConfigError(
            "calculate_per_token_loss=True with average_in_collective=True: the token count is the only divisor of a "
            "per-token loss; drop --ddp-average-in-collective or --calculate-per-token-loss."
        )
    if per_token_loss:
        return GradReduction(1.0, SUM)
    if average_in_collective:
        return GradReduction(expt_dp_size / dp_cp_size if is_expert else 1.0, AVG)
    return GradReduction(1.0 / dp_cp_size, SUM)
