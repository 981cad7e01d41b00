"""The kernel of an Adam step, interpreted, against torch's own."""

import math

import pytest
import torch
from torch.optim.adam import adam

from megatron.core.fusions.fused_adam import AdamRule, AdamTensors, StepScalars, _adam_kernel, adam_step
from tests.common.hopper import ptx
from tests.common.small_models import normal

BETAS, EPS, LR = (0.9, 0.95), 1e-8, 0.01


def problem(count=37, moment=torch.float32, grad=torch.float32):
    """Tensors of a parameter after three steps."""
    param, given = normal(count).float(), normal(count, seed=1).to(grad)
    mean, square = normal(count, seed=2).to(moment), normal(count, seed=3).square().to(moment)
    return AdamTensors(param, given, mean, square, torch.tensor(3.0), torch.zeros(count, dtype=torch.bfloat16))


def steps_job(tensors, rule, grad_scale, found_inf):
    """The tensors after two steps, the guard of which is `found_inf`."""
    own = AdamTensors(*(tensor.clone() for tensor in tensors))
    numbers = (LR, grad_scale, found_inf)
    scalars = StepScalars(*(None if number is None else torch.tensor([number]) for number in numbers))
    for _ in range(2):
        adam_step(own, scalars, rule)
        own.step.add_(1.0)
    return list(own)


def expected(tensors, rule, grad_scale):
    """The same by torch: parameter and both moments, in fp32."""
    param, grad, mean, square, step, _ = (tensor.clone() for tensor in tensors)
    mean, square, rounding = mean.float(), square.float(), tensors.exp_avg.dtype
    for _ in range(2):
        adam(
            [param],
            [grad.float() / (grad_scale or 1.0)],
            [mean],
            [square],
            [],
            [step],
            fused=False,
            foreach=False,
            decoupled_weight_decay=rule.is_decoupled,
            amsgrad=False,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            lr=LR,
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            maximize=False,
        )
        for moment in (mean, square):
            moment.copy_(moment.to(rounding))
    return param, mean, square


CASES = {
    "fp32": ({}, {}, None),
    "clipped": ({}, {}, 3.7),
    "coupled": ({}, {"is_decoupled": False}, 2.0),
    "no_decay": ({}, {"weight_decay": 0.0}, None),
    "bf16": ({"moment": torch.bfloat16, "grad": torch.bfloat16}, {}, 1.5),
    "odd_blocks": ({"count": 1025}, {}, None),
    "no_momentum": ({}, {"betas": (0.0, 0.95)}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_steps_as_torch_does(interpreted, name):
    sizes, numbers, grad_scale = CASES[name]
    tensors = problem(**sizes)
    rule = AdamRule(**{"betas": BETAS, "eps": EPS, "weight_decay": 0.1, "is_decoupled": True} | numbers)
    param, _, mean, square, step, rounded = interpreted(steps_job, tensors, rule, grad_scale, None)
    for got, wanted in zip((param, mean, square), expected(tensors, rule, grad_scale), strict=True):
        rtol = 2e-6 if got.dtype == torch.float32 else 2.0**-8
        torch.testing.assert_close(got.float(), wanted, rtol=rtol, atol=1e-6)
    assert step.item() == 5.0
    assert torch.equal(rounded, param.to(torch.bfloat16))


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_raised_guard_leaves_everything(interpreted, found_inf):
    tensors = problem()
    after = interpreted(steps_job, tensors, AdamRule(BETAS, EPS, 0.1, True), None, found_inf)
    same = [torch.equal(old, new) for old, new in zip(tensors, after, strict=True)]
    assert same == ([True] * 4 + [False, True] if found_inf else [False, True, False, False, False, False])


def test_kernel_compiles_for_hopper():
    names = ("param", "exp_avg", "exp_avg_sq", "step", "lr", "grad_scale", "found_inf")
    numbers = {"beta1": 0.9, "beta2": 0.95, "log_beta1": math.log(0.9), "log_beta2": -math.inf, "eps": EPS}
    numbers |= {"weight_decay": 0.1, "decoupled": True, "interpreted": False, "block": 1024}
    text = ptx(_adam_kernel, numbers, dict.fromkeys(names, "*fp32") | {"grad": "*bf16", "rounded": "*bf16"})
    assert ".target sm_90" in text
