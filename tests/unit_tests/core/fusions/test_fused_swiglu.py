"""The SwiGLU kernels under the interpreter against the formula in fp64, and their build for a GPU."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions import fused_bias_glu, fused_swiglu, fused_weighted_activation
from megatron.core.fusions.fused_bias_glu import bias_glu
from megatron.core.fusions.fused_swiglu import _backward_kernel, _forward_kernel, kernel_swiglu, kernel_swiglu_backward
from megatron.core.fusions.fused_weighted_activation import weighted_activation
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.grouped_mlp import activate_experts
from tests.common.compiled import compiled_for_hopper
from tests.common.moe_layers import normal
from tests.common.mutants import replaced
from tests.common.small_models import SWIGLU, small_config

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
"""Twice the relative error of one rounding: the other half is for the fp32 arithmetic before it."""
SHAPES = [(1, 128), (3, 130), (9, 768), (2, 14336), (0, 128), (5, 1)]


def formula(x, bias, probs, grad):
    """Value and gradients of x, bias, probs in fp64 by autograd of the plain formula."""
    leaves = [None if leaf is None else leaf.double().requires_grad_() for leaf in (x, bias, probs)]
    gate, up = (leaves[0] if bias is None else leaves[0] + leaves[1]).chunk(2, dim=-1)
    y = F.silu(gate) * up
    if probs is not None:
        y = y * leaves[2].view(*y.shape[:-1], 1)
    present = [leaf for leaf in leaves if leaf is not None]
    return y.detach(), *torch.autograd.grad(y, present, grad.double())


def operands(num_rows, width, dtype, has_bias=False, has_probs=True):
    x, grad = normal(num_rows, 2 * width + 2, dtype=dtype)[:, 1:-1], normal(num_rows, width, seed=1, dtype=dtype)
    bias = normal(2 * width, seed=2, dtype=dtype) if has_bias else None
    return x, bias, normal(num_rows, seed=3, dtype=torch.float32) if has_probs else None, grad


def kernels_job(cases):
    return [(kernel_swiglu(x, b, p), *kernel_swiglu_backward(grad, x, b, p)) for x, b, p, grad in cases]


def assert_rounded_once(got, wanted, unit):
    """Each element [...] is within one rounding; sums of many are compared with the largest of them."""
    torch.testing.assert_close(
        got.double(), wanted, rtol=unit, atol=4 * 2.0**-23 * float(wanted.abs().max().nan_to_num())
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_round_the_formula_once(interpreted, dtype):
    cases = [operands(*shape, dtype) for shape in SHAPES]
    for (x, bias, probs, grad), got in zip(cases, interpreted(kernels_job, cases), strict=True):
        assert [t.dtype for t in got] == [dtype, dtype, torch.float32]
        if not len(x):
            assert [t.shape for t in got] == [grad.shape, x.shape, probs.shape]
            continue
        y, grad_x, grad_probs = formula(x, bias, probs, grad)
        assert_rounded_once(got[0], y, UNIT[dtype])
        assert_rounded_once(got[1], grad_x, UNIT[dtype])
        terms = (grad.double() * y / probs.double()[:, None]).abs().sum(dim=1)
        assert ((got[2] - grad_probs).abs() <= 2.0**-20 * terms).all()


def test_kernels_add_a_bias_and_do_without_probabilities(interpreted):
    cases = [operands(3, 130, torch.float32, has_bias=True, has_probs=False), operands(3, 16, torch.float32, True)]
    for case, got in zip(cases, interpreted(kernels_job, cases), strict=True):
        wanted = formula(*case)
        assert_rounded_once(got[0], wanted[0], UNIT[torch.float32])
        assert_rounded_once(got[1], wanted[1], UNIT[torch.float32])


def strided_job(x, grad, probs):
    """Kernels on views: every second column, columns of a wider row, one row for all, a gradient of one number."""
    views = [(x[:, ::2], grad[:, ::2]), (x[:, :8], grad[:, :4]), (x[:1, :8].expand(6, 8), grad[:1, :1].expand(6, 4))]
    return [
        [(kernel_swiglu(a, None, probs), *kernel_swiglu_backward(b, a, None, probs)) for a, b in pair]
        for pair in (views, [(a.contiguous(), b.contiguous()) for a, b in views])
    ]


def test_strided_operands_are_read_as_they_are(interpreted):
    x, grad, probs = (normal(6, n, seed=n, dtype=torch.float32) for n in (16, 8, 2))
    views, copies = interpreted(strided_job, x, grad, probs[:, 0])
    for view, copy in zip(views, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(view, copy, strict=True))


def module_job(x, bias, probs, grad):
    """Both users with the kernels switched on, twice backward; and rows of NaN beside good ones."""
    leaves = [leaf.clone().requires_grad_() for leaf in (x, bias, probs)]
    found = []
    with replaced(fused_swiglu, "uses_kernels", lambda tensor: True):
        for y in (
            weighted_activation(leaves[0], leaves[2], F.silu, True),
            bias_glu(leaves[0].unflatten(0, (2, -1)), leaves[1], F.silu).flatten(0, 1),
        ):
            grads = [
                torch.autograd.grad(y, leaves, grad, retain_graph=True, allow_unused=True, materialize_grads=True)
                for _ in range(2)
            ]
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
            found.append((y.detach(), *grads[0]))
        spoilt = torch.cat([x, torch.full_like(x, torch.nan)])
        return found, weighted_activation(spoilt, torch.cat([probs, probs]), F.silu, True)[: len(x)]


def test_experts_and_dense_layers_use_the_kernels(interpreted):
    x, bias, probs, grad = operands(4, 24, torch.float32, has_bias=True)
    (weighted, dense), clean = interpreted(module_job, x, bias, probs, grad)
    y, grad_x, grad_probs = formula(x, None, probs, grad)
    for got, wanted in zip(weighted, (y, grad_x, torch.zeros_like(bias), grad_probs), strict=True):
        assert_rounded_once(got, wanted.double(), UNIT[torch.float32])
    y, grad_x, grad_bias = formula(x, bias, None, grad)
    for got, wanted in zip(dense, (y, grad_x, grad_bias, torch.zeros_like(probs)), strict=True):
        assert_rounded_once(got, wanted.double(), UNIT[torch.float32])
    assert torch.equal(clean, weighted[0])


@pytest.mark.parametrize("user", ["experts", "dense"])
def test_the_flag_turns_the_kernels_off(user):
    x = normal(4, 48, dtype=torch.float32)
    module = {"experts": fused_weighted_activation, "dense": fused_bias_glu}[user]

    def activate(**fields):
        config = small_config(**SWIGLU, **fields)
        if user == "experts":
            return activate_experts(config, x, None)[0]
        return MLP(config, MLPSubmodules()).activate(x, None)

    with replaced(fused_swiglu, "uses_kernels", lambda tensor: True), replaced(module, "fused_swiglu", lambda *_: None):
        assert activate() is None
        assert torch.allclose(activate(bias_swiglu_fusion=False), F.silu(x[:, :24]) * x[:, 24:])


@pytest.mark.parametrize("absent", [(), ("bias",), ("bias", "probs", "grad_probs")], ids=str)
@pytest.mark.parametrize(("kernel", "rows"), [(_forward_kernel, 8), (_backward_kernel, 4)], ids=["forward", "backward"])
def test_kernels_compile_for_hopper_and_move_16_bytes_at_a_time(kernel, rows, absent):
    constants = {"rows": rows, "columns": 256, "interpreted": False} | dict.fromkeys(absent)
    ptx = compiled_for_hopper(kernel, constants, dict.fromkeys(("probs", "grad_probs"), "*fp32"))
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx
