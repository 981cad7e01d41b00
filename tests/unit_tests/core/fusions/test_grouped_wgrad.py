"""The grouped weight-gradient kernel under the interpreter, against the plain form; its native twin is a GPU test."""

import pytest
import torch

from megatron.core.fusions.fused_wgrad import GroupedWgrad, accumulate_wgrad
from megatron.core.fusions.grouped_wgrad import CONFIGS, WgradConfig, config_for, grouped_wgrad, uses_wgrad_kernel
from tests.common.moe_layers import normal

SMALL = WgradConfig(block_out=16, block_in=32, block_rows=16, band=2, num_warps=4, pieces=2)
OTHER = WgradConfig(block_out=32, block_in=64, block_rows=32, band=1, num_warps=4)
SPARE = 24


def problem(counts, dtype=torch.bfloat16, main_dtype=torch.float32, spare=SPARE):
    """main [n, 48, 72], grad [R, 48], rows [R, 72], ends int32 [n]; the spare rows hold NaN."""
    num_rows = sum(counts)
    grad, rows = normal(num_rows, 48, seed=1).to(dtype), normal(num_rows, 72, seed=2).to(dtype)
    grad, rows = (torch.cat([x, torch.full((spare, x.shape[1]), torch.nan, dtype=dtype)]) for x in (grad, rows))
    main = normal(len(counts), 48, 72, seed=3).to(main_dtype)
    return main, grad, rows, torch.tensor(counts).cumsum(0, dtype=torch.int32)


def kernel_job(counts, config, dtype=torch.bfloat16, main_dtype=torch.float32, spare=SPARE):
    main, grad, rows, ends = problem(counts, dtype, main_dtype, spare)
    grouped_wgrad(main, grad, rows, ends, config)
    return main


@pytest.mark.parametrize("config", [SMALL, OTHER], ids=["small", "other"])
@pytest.mark.parametrize("counts", [(5, 0, 35, 0), (16, 32, 17), (0, 0, 0), (40,), (0, 0, 3, 61)], ids=str)
def test_interpreted_kernel_adds_each_group_and_nothing_else(interpreted, counts, config):
    main, grad, rows, ends = problem(counts)
    before = main.clone()
    accumulate_wgrad(main, grad, rows, ends)
    got = interpreted(kernel_job, counts, config)
    torch.testing.assert_close(got, main, rtol=1e-6, atol=1e-5)
    for expert, count in enumerate(counts):
        assert count > 0 or torch.equal(got[expert], before[expert])


@pytest.mark.parametrize("main_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_interpreted_kernel_rounds_once(interpreted, dtype, main_dtype):
    main, grad, rows, ends = problem((5, 0, 19), dtype, main_dtype)
    accumulate_wgrad(main, grad, rows, ends)
    got = interpreted(kernel_job, (5, 0, 19), SMALL, dtype, main_dtype)
    torch.testing.assert_close(got, main, rtol=2**-8 if main_dtype is torch.bfloat16 else 1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_plain_form_equals_one_product_per_group_and_leaves_empty_groups_alone(dtype):
    counts = (5, 0, 3, 0)
    main, grad, rows, ends = problem(counts, dtype, torch.promote_types(dtype, torch.float32))
    before = main.clone()
    accumulate_wgrad(main, grad, rows, ends)
    wide = main.dtype
    assert torch.equal(main[0], before[0] + grad[:5].to(wide).t() @ rows[:5].to(wide))
    assert torch.equal(main[2], before[2] + grad[5:8].to(wide).t() @ rows[5:8].to(wide))
    assert torch.equal(main[1::2], before[1::2])


def test_main_gradients_that_are_no_stack_are_added_to_as_well():
    main, grad, rows, ends = problem((5, 0, 3), torch.float64, torch.float64)
    apart = [part.clone() for part in main.unbind(0)]
    GroupedWgrad(grad, rows, tuple(ends.tolist())).add_to(apart)
    accumulate_wgrad(main, grad, rows, ends)
    assert torch.equal(torch.stack(apart), main)


def test_the_table_has_a_row_for_each_class_of_shapes():
    assert config_for(1536, 2048) is CONFIGS[True]
    assert config_for(2048, 768) is CONFIGS[True]
    assert config_for(4096, 7168) is CONFIGS[False]


def test_the_kernel_is_for_a_gpu():
    main, grad, rows, _ = problem((5, 3))
    assert not uses_wgrad_kernel(main, grad, rows)
