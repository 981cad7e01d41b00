"""The table of reduction factors, for DP * CP = 8 and EDP = 2."""

import pytest
import torch.distributed as dist

from megatron.core.distributed.grad_scaling import GradReduction, grad_reduction
from megatron.core.errors import ConfigError

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


@pytest.mark.parametrize(
    ("per_token", "average", "is_expert", "expected"),
    [
        (False, False, False, GradReduction(0.125, SUM)),
        (False, False, True, GradReduction(0.125, SUM)),
        (False, True, False, GradReduction(1.0, AVG)),
        (False, True, True, GradReduction(0.25, AVG)),
        (True, False, False, GradReduction(1.0, SUM)),
        (True, False, True, GradReduction(1.0, SUM)),
    ],
)
def test_factor_and_operation(per_token, average, is_expert, expected):
    got = grad_reduction(
        is_expert=is_expert, dp_cp_size=8, expt_dp_size=2, per_token_loss=per_token, average_in_collective=average
    )
    assert got == expected


def test_per_token_loss_refuses_average_in_collective():
    with pytest.raises(ConfigError, match="calculate_per_token_loss=True with average_in_collective=True"):
        grad_reduction(is_expert=False, dp_cp_size=8, expt_dp_size=2, per_token_loss=True, average_in_collective=True)
