"""The kernels of the RMS norm with its residual, interpreted, against the formula in fp64."""

import pytest
import torch

from megatron.core.fusions.fused_rms_norm import NormRule, _backward_kernel, _forward_kernel, add_rms_norm
from tests.common.hopper import ptx
from tests.common.small_models import normal

STEPS = {torch.bfloat16: 2.0**-8, torch.float32: 2e-6}


def norm_job(x, residual, weight, rule, grads):
    """Norm, sum, and the gradients of x, residual and weight; a missing gradient is that of an unused output."""
    leaves = [None if leaf is None else leaf.clone().requires_grad_() for leaf in (x, residual, weight)]
    outputs = add_rms_norm(*leaves, rule)
    used = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    torch.autograd.backward(*zip(*used, strict=True))
    return [out.detach().cpu() for out in outputs], [None if leaf is None else leaf.grad.cpu() for leaf in leaves]


def expected(x, residual, weight, rule, grads):
    """The same in fp64, from the sum as it was rounded."""
    total = (x if residual is None else x + residual).double().requires_grad_()
    factor = weight.double().requires_grad_()
    normed = total / torch.sqrt((total**2).mean(-1, keepdim=True) + rule.eps) * (factor + rule.offset)
    used = [(out, grad.double()) for out, grad in zip((normed, total), grads, strict=True) if grad is not None]
    torch.autograd.backward(*zip(*used, strict=True))
    return [normed.detach(), total.detach()], [total.grad, None if residual is None else total.grad, factor.grad]


def make_case(shape, dtype=torch.float32, has_residual=True, has_sum=True, offset=0.0, weight_dtype=None):
    x, residual = normal(*shape).to(dtype) * 3, normal(*shape, seed=1).to(dtype)
    weight = normal(shape[-1], seed=2).to(weight_dtype or dtype)
    grads = normal(*shape, seed=3).to(weight.dtype), normal(*shape, seed=4).to(dtype) if has_sum else None
    return x, residual if has_residual else None, weight, NormRule(1e-5, offset), grads


def check(got, case):
    wanted = expected(*case)
    dtypes = [[case[2].dtype, case[0].dtype], [case[0].dtype, case[0].dtype, case[2].dtype]]
    for side, wanted_side, types in zip(got, wanted, dtypes, strict=True):
        for one, other, dtype in zip(side, wanted_side, types, strict=True):
            if other is None:
                assert one is None
                continue
            assert one.dtype == dtype
            step = STEPS[one.dtype]
            largest = max([1.0, *other.abs().flatten().tolist()])
            torch.testing.assert_close(one.double(), other, rtol=step, atol=4e-6 * largest)


CASES = {
    "sum": ((3, 2, 40), {}),
    "bf16": ((3, 2, 40), {"dtype": torch.bfloat16}),
    "no_residual": ((3, 2, 40), {"has_residual": False}),
    "norm_alone": ((3, 2, 40), {"has_residual": False, "has_sum": False, "dtype": torch.bfloat16}),
    "residual_unused": ((3, 2, 40), {"has_sum": False}),
    "zero_centred": ((5, 7), {"offset": 1.0}),
    "fp32_stream": ((5, 33), {"weight_dtype": torch.bfloat16}),
    "wide": ((2, 3000), {"dtype": torch.bfloat16}),
    "heads": ((70, 16), {"dtype": torch.bfloat16}),
    "one_row": ((1, 128), {}),
    "no_row": ((0, 128), {}),
    "one_column": ((3, 1), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_formula(interpreted, name):
    shape, fields = CASES[name]
    case = make_case(shape, **fields)
    check(interpreted(norm_job, *case), case)


def many_blocks_job(case):
    """A weight gradient over more blocks than programs."""
    from megatron.core.fusions import fused_rms_norm

    fused_rms_norm.MAX_PROGRAMS, kept = 3, fused_rms_norm.MAX_PROGRAMS
    try:
        return norm_job(*case)
    finally:
        fused_rms_norm.MAX_PROGRAMS = kept


def test_programs_take_turns_over_the_rows(interpreted):
    case = make_case((17, 1500))
    check(interpreted(many_blocks_job, case), case)


def test_unused_norm_hands_the_gradient_on(interpreted):
    x, residual, weight, rule, grads = make_case((3, 8))
    _, (grad_x, grad_residual, grad_weight) = interpreted(unused_norm_job, x, residual, weight, rule, grads[1])
    assert torch.equal(grad_x, grads[1])
    assert torch.equal(grad_residual, grads[1])
    assert grad_weight is None


def unused_norm_job(x, residual, weight, rule, grad):
    leaves = [leaf.clone().requires_grad_() for leaf in (x, residual, weight)]
    add_rms_norm(*leaves, rule)[1].backward(grad)
    return None, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("has_residual", [False, True])
def test_kernels_compile_for_hopper(has_residual):
    names = ("x", "residual", "weight", "normed", "total", "grad", "grad_total", "grad_x")
    types = dict.fromkeys(names, "*bf16") | dict.fromkeys(("scales", "partial"), "*fp32")
    types |= {"eps": "fp32", "offset": "fp32"}
    sizes = {"interpreted": False, "rows": 2, "columns": 128}
    assert ".target sm_90" in ptx(_forward_kernel, sizes | ({} if has_residual else {"residual": None}), types)
    assert ".target sm_90" in ptx(
        _backward_kernel, sizes | {"stages": 2} | ({} if has_residual else {"grad_total": None}), types
    )
