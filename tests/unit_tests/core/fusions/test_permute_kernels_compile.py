"""Kernels that the interpreter accepts must also compile: Triton needs no GPU to build code for one."""

import pytest

from megatron.core.fusions.fused_permute import _clear_kernel, _gather_kernel, _spread_kernel, _sum_kernel
from megatron.core.fusions.fused_row_layout import (
    _count_kernel,
    _mark_kernel,
    _place_kernel,
    _slots_kernel,
    prefix_kernel,
)
from tests.common.hopper import ptx

SIZES = {"num_slots": 8, "columns": 256}
NO_PROBS = {"probs": None, "row_probs": None}
ASKED = {"multiple": 16, "pads_empty": True}
BLOCK = {"num_slots": 8, "block": 32, "width": 256}
SUM = SIZES | {"interpreted": False}
KERNELS = [
    (_gather_kernel, SIZES, "bf16"),
    (_gather_kernel, SIZES | NO_PROBS, "u8"),
    (_spread_kernel, SIZES, "bf16"),
    (_spread_kernel, SIZES | NO_PROBS, "u8"),
    (_clear_kernel, {"columns": 256}, "bf16"),
    (_clear_kernel, {"columns": 256, "row_probs": None}, "u8"),
    (_sum_kernel, SUM | {"is_double": False}, "bf16"),
    (_sum_kernel, SUM | {"is_double": True} | NO_PROBS, "fp64"),
    (_count_kernel, BLOCK, "i32"),
    (prefix_kernel, {"num_experts": 128, "columns": 8, "chunk": 64}, "i32"),
    (_mark_kernel, {"chunk": 32, "width": 256} | ASKED, "i32"),
    (_place_kernel, BLOCK | ASKED, "i32"),
    (_slots_kernel, BLOCK | {"slot_width": 8}, "i32"),
]


@pytest.mark.parametrize(("kernel", "constants", "dtype"), KERNELS, ids=lambda value: getattr(value, "__name__", None))
def test_kernel_compiles_for_hopper(kernel, constants, dtype):
    types = {"tokens": f"*{dtype}", "rows": f"*{dtype}", "probs": "*fp32", "row_probs": "*fp32"}
    types["routing_map"] = "*u8"
    types |= dict.fromkeys(("ids", "slots", "pairs", "block_counts", "before", "counts"), "*i32")
    types |= dict.fromkeys(("kept", "dropped"), "*i64")
    assert ".target sm_90" in ptx(kernel, constants, types)
