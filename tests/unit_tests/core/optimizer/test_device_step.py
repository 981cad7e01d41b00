"""The step that reads nothing: equal to the ordinary one, and without any effect if the guard is raised."""

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.precision_aware_adam import PrecisionAwareAdam
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.step_guard import StepGuard

CPU = torch.device("cpu")
KINDS = {
    "adamw": {},
    "adam": {"decoupled_weight_decay": False},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9},
    "bf16": {"bf16": True},
    "loss_scale": {"loss_scale": 8.0},
}


def build(kind):
    fields = {"optimizer": "adam", "lr": 0.1, "clip_grad": 0.5, "log_num_zeros_in_grad": True, **KINDS[kind]}
    dtype = torch.bfloat16 if fields.get("bf16") else torch.float32
    numbers = torch.linspace(-1, 1, 6)
    params = [torch.nn.Parameter(numbers.to(dtype)), torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))]
    for param in params:
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    return MegatronOptimizer(OptimizerConfig(**fields), named, ProcessGroupCollection()), params


def fill_gradients(params, value=1.0):
    for number, param in enumerate(params):
        param.main_grad.copy_(torch.arange(param.numel()).view(param.shape) * (value + number))


def state_of(optimizer, params):
    tensors = [tensor for state in optimizer.named_state() for tensor in state.tensors.values()]
    return [tensor.detach().clone() for tensor in [*params, *tensors]]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_device_step_is_the_ordinary_step(kind):
    (ordinary, ordinary_params), (guarded, guarded_params) = build(kind), build(kind)
    for value in (1.0, 3.0):
        fill_gradients(ordinary_params, value)
        fill_gradients(guarded_params, value)
        _, norm, zeros = ordinary.step()
        guard = StepGuard(CPU)
        found = guarded.step_on_device(guard, refuses_non_finite=True)
        assert (found.norm.item(), found.num_zeros.item()) == (norm, zeros)
        assert guard.raised().item() == 0.0
        assert equal(state_of(ordinary, ordinary_params), state_of(guarded, guarded_params))


@pytest.mark.parametrize("kind", KINDS)
def test_raised_guard_leaves_everything_as_it_was(kind):
    optimizer, params = build(kind)
    fill_gradients(params)
    optimizer.step_on_device(StepGuard(CPU), refuses_non_finite=True)
    before = state_of(optimizer, params)
    fill_gradients(params, 5.0)
    guard = StepGuard(CPU)
    guard.report_rows(torch.tensor([9]), budget=8, num_balanced=8.0)
    optimizer.step_on_device(guard, refuses_non_finite=True)
    assert equal(before, state_of(optimizer, params))


@pytest.mark.parametrize(("refuses", "kind", "raised"), [(True, "adamw", 1.0), (False, "loss_scale", 1.0)])
def test_gradient_that_is_not_finite_raises_the_guard(refuses, kind, raised):
    optimizer, params = build(kind)
    before = state_of(optimizer, params)
    params[0].main_grad.fill_(float("inf"))
    guard = StepGuard(CPU)
    optimizer.step_on_device(guard, refuses)
    assert guard.raised().item() == raised
    assert equal(before, state_of(optimizer, params))


def test_unchecked_gradient_acts_as_in_the_ordinary_step():
    optimizer, params = build("adamw")
    params[0].main_grad.fill_(float("nan"))
    guard = StepGuard(CPU)
    optimizer.step_on_device(guard, refuses_non_finite=False)
    assert guard.raised().item() == 0.0
    assert params[0].isnan().all()


def test_next_step_finds_no_flag_of_the_last():
    optimizer, params = build("adamw")
    params[0].main_grad.fill_(float("inf"))
    optimizer.step_on_device(StepGuard(CPU), refuses_non_finite=True)
    before = state_of(optimizer, params)
    fill_gradients(params)
    optimizer.step()
    assert not equal(before, state_of(optimizer, params))


def test_moments_of_other_dtypes_stay_too():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = PrecisionAwareAdam([{"params": [param], "lr": 0.1, "weight_decay": 0.1}], (0.9, 0.95), 1e-8, True)
    moments = {key: torch.full((3,), 0.1, dtype=torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[param] = {"step": torch.zeros(()), **moments}
    before = [tensor.clone() for tensor in (param, *optimizer.state[param].values())]
    param.decoupled_grad = torch.ones(3)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert equal(before, [param, *optimizer.state[param].values()])
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not equal(before, [param, *optimizer.state[param].values()])


def test_loss_scale_learns_how_the_step_ended():
    config = OptimizerConfig(optimizer="adam", lr=0.1, fp16=True, initial_loss_scale=8.0, hysteresis=1)
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = MegatronOptimizer(config, [("p", param)], ProcessGroupCollection())
    optimizer.settle(is_skipped=True)
    assert optimizer.get_loss_scale().item() == 4.0
    optimizer.settle(is_skipped=False)
    assert optimizer.get_loss_scale().item() == 4.0
