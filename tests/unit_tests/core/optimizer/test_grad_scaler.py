"""The course of a loss scale."""

import torch

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, build_grad_scaler

CPU = torch.device("cpu")


def scales_after(scaler, overflows):
    seen = []
    for found_inf in overflows:
        scaler.update(bool(found_inf))
        seen.append(scaler.scale.item())
    return seen


def test_first_overflow_is_tolerated_and_further_ones_halve():
    scaler = DynamicGradScaler(16.0, min_scale=1.0, growth_interval=100, hysteresis=2, device=CPU)
    assert scales_after(scaler, [1, 1, 0, 1]) == [16.0, 8.0, 8.0, 4.0]


def test_scale_never_falls_below_its_floor():
    scaler = DynamicGradScaler(4.0, min_scale=2.0, growth_interval=100, hysteresis=1, device=CPU)
    assert scales_after(scaler, [1, 1, 1]) == [2.0, 2.0, 2.0]


def test_scale_doubles_after_the_window_and_tolerance_returns():
    scaler = DynamicGradScaler(4.0, min_scale=1.0, growth_interval=2, hysteresis=2, device=CPU)
    assert scales_after(scaler, [1, 0, 0, 1, 1]) == [4.0, 4.0, 8.0, 8.0, 4.0]


def test_overflow_restarts_the_window():
    scaler = DynamicGradScaler(4.0, min_scale=1.0, growth_interval=2, hysteresis=2, device=CPU)
    assert scales_after(scaler, [0, 1, 0, 0]) == [4.0, 4.0, 4.0, 8.0]


def test_history_survives_saving():
    scaler = DynamicGradScaler(4.0, min_scale=1.0, growth_interval=3, hysteresis=2, device=CPU)
    scales_after(scaler, [1, 0, 0])
    fresh = DynamicGradScaler(64.0, min_scale=1.0, growth_interval=3, hysteresis=2, device=CPU)
    fresh.load_state_dict(scaler.state_dict())
    assert fresh.state_dict() == {"scale": 4.0, "num_good_steps": 2, "hysteresis_left": 1}
    assert scales_after(fresh, [0]) == [8.0]


def test_kind_follows_the_configuration():
    assert build_grad_scaler(OptimizerConfig(bf16=True), CPU) is None
    assert build_grad_scaler(OptimizerConfig(fp16=True), CPU).scale.item() == 4294967296.0
    constant = build_grad_scaler(OptimizerConfig(fp16=True, loss_scale=128.0), CPU)
    assert type(constant) is ConstantGradScaler
    assert (constant.scale.item(), constant.inv_scale.item()) == (128.0, 0.0078125)
    assert scales_after(constant, [1, 1, 1]) == [128.0, 128.0, 128.0]
