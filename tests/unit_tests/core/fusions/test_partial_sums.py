"""The kernel that adds partial sums, interpreted, against fp64."""

import pytest
import torch

from megatron.core.fusions.partial_sums import ROWS, _add_kernel, add_partial_sums
from tests.common.hopper import ptx
from tests.common.small_models import normal


@pytest.mark.parametrize("shape", [(1, 3, 20), (2, ROWS + 5, 9), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_are_rounded_once(interpreted, shape, dtype):
    partial = normal(*shape).float()
    got, wanted = interpreted(add_partial_sums, partial, dtype), partial.double().sum(dim=1)
    assert got.dtype == dtype
    step = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(got.double(), wanted, rtol=step, atol=2e-5)


def test_kernel_compiles_for_hopper():
    sizes = {"interpreted": False, "rows": 512, "columns": 8}
    assert ".target sm_90" in ptx(_add_kernel, sizes, {"partial": "*fp32", "total": "*bf16"})
