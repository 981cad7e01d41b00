"""The kernels of FP8 products under the interpreter, against the products of what the codes stand for."""

import pytest
import torch

from megatron.core.fp8.gemm import add_grouped_wgrad, grouped_matmul
from megatron.core.fp8.plain_operand import plain_activation, plain_weight
from megatron.core.fp8.recipes import RECIPES
from megatron.core.fusions.fp8_grouped_gemm import Cut, ScaledCodes, grouped_rows_product, grouped_wgrad_product
from tests.common.moe_layers import normal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CUTS = {"rowwise": Cut(32, 64, band=2, num_warps=4), "blockwise": Cut(64, 64, band=1, num_warps=4)}
SPARE, OUT, IN = 32, 160, 144


def problem(recipe, counts, dtype):
    """Rows [R, IN] and output gradients [R, OUT] of experts, NaN behind the last; weights [n, OUT, IN]; ends."""
    recipe, ends = RECIPES[recipe], torch.tensor(counts).cumsum(0, dtype=torch.int32)
    tail = torch.full((SPARE, OUT), torch.nan)
    rows = torch.cat([normal(sum(counts), IN, seed=1).float(), tail[:, :IN]])
    grad = torch.cat([normal(sum(counts), OUT, seed=2).float(), tail])
    weight = plain_weight(normal(len(counts), OUT, IN, seed=3).float(), recipe, E4M3)
    return plain_activation(rows, recipe, E4M3, ends), plain_activation(grad, recipe, dtype, ends), weight, ends


def lines(part, *shape):
    """Scales as the kernels take them."""
    if part.block is None:
        return ScaledCodes(part.codes, part.scale.reshape(shape))
    return ScaledCodes(part.codes, part.scale if part.scale.dim() == 3 else part.scale.t().contiguous().t())


def rows_job(recipe, counts, is_fast):
    rows, grad, weight, ends = problem(recipe, counts, E5M2)
    count, num_rows = len(counts), len(rows.by_row.codes)
    options = {"has_strips": recipe == "blockwise", "is_fast": is_fast, "cut": CUTS[recipe]}
    out = grouped_rows_product(
        lines(rows.by_row, num_rows), lines(weight.by_row, count, OUT), ends, torch.bfloat16, **options
    )
    back = grouped_rows_product(
        lines(grad.by_row, num_rows), lines(weight.by_column, count, IN), ends, torch.float32, **options
    )
    return out, back


def wgrad_job(recipe, counts, is_fast):
    rows, grad, _, ends = problem(recipe, counts, E5M2)
    main = normal(len(counts), OUT, IN, seed=4).float()
    left, right = lines(grad.by_column, len(counts), OUT), lines(rows.by_column, len(counts), IN)
    options = {"has_strips": recipe == "blockwise", "is_fast": is_fast, "cut": CUTS[recipe]}
    grouped_wgrad_product(main, left, right, ends, **options)
    return main


CASES = [("rowwise", (48, 0, 144)), ("rowwise", (0, 0)), ("blockwise", (128, 0, 144)), ("rowwise", (16,))]


@pytest.mark.parametrize(("recipe", "counts"), CASES, ids=str)
def test_rows_times_weights(interpreted, recipe, counts):
    rows, grad, weight, ends = problem(recipe, counts, E5M2)
    out, back = interpreted(rows_job, recipe, counts, len(counts) > 2)
    want = grouped_matmul(rows.by_row, weight.by_row, ends, torch.float32)
    want_back = grouped_matmul(grad.by_row, weight.by_column, ends, torch.float32)
    real = slice(0, sum(counts))
    torch.testing.assert_close(out[real].float(), want[real], rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(back[real], want_back[real], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("recipe", "counts"), CASES, ids=str)
def test_weight_gradients_are_added(interpreted, recipe, counts):
    rows, grad, _, ends = problem(recipe, counts, E5M2)
    start = normal(len(counts), OUT, IN, seed=4).float()
    want = start.clone()
    add_grouped_wgrad(want, grad.by_column, rows.by_column, ends)
    got = interpreted(wgrad_job, recipe, counts, len(counts) > 2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(got[expert], start[expert]) for expert, count in enumerate(counts) if not count)
