"""Adam of the stand-in for Transformer Engine beside ours: equal updates, skipped steps, what is refused."""

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.extensions.transformer_engine.optimizer import EngineAdam
from megatron.core.optimizer.precision_aware_adam import PrecisionAwareAdam
from tests.common.engine_runs import engine
from tests.common.small_models import normal

BETAS, EPS = (0.9, 0.95), 1e-8


def parameters():
    return [torch.nn.Parameter(normal(n, seed=n, dtype=torch.float32)) for n in (7, 33)]


def fill(optimizer, moments):
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                name: torch.zeros_like(param, dtype=moments) for name in ("exp_avg", "exp_avg_sq")
            }
            optimizer.state[param]["step"] = torch.zeros(())


def steps(optimizer, guards=(0.0, 0.0, 1.0, 0.0)):
    """Four steps, the third of them skipped; the parameters and the state at the end."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, guard in enumerate(guards):
        for param in params:
            param.decoupled_grad = normal(*param.shape, seed=100 + number, dtype=torch.float32)
        optimizer.found_inf = torch.tensor(guard)
        optimizer.step()
    return [param.detach() for param in params] + [
        optimizer.state[param][name].float() for param in params for name in ("exp_avg", "exp_avg_sq", "step")
    ]


def groups_of(params):
    return [
        {"params": params[:1], "lr": torch.tensor(0.1), "weight_decay": 0.1},
        {"params": params[1:], "lr": torch.tensor(0.2), "weight_decay": 0.0},
        {"params": [], "lr": torch.tensor(0.2), "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_updates_are_those_of_our_adam_and_a_raised_guard_changes_nothing(moments, is_decoupled):
    ours = PrecisionAwareAdam(groups_of(parameters()), BETAS, EPS, is_decoupled)
    fill(ours, moments)
    with engine():
        theirs = EngineAdam(groups_of(parameters()), BETAS, EPS, is_decoupled, (moments, moments))
        fill(theirs, moments)
        got = steps(theirs)
    for value, expected in zip(got, steps(ours), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    assert [float(theirs.state[p]["step"]) for group in theirs.param_groups for p in group["params"]] == [3.0, 3.0]


def test_what_its_kernels_cannot_read_is_refused():
    params = parameters()
    with engine():
        with pytest.raises(ConfigError, match=r"exp_avg_dtype, exp_avg_sq_dtype .*equal ones; set both"):
            EngineAdam(groups_of(params), BETAS, EPS, True, (torch.float32, torch.bfloat16))
        optimizer = EngineAdam(groups_of(params), BETAS, EPS, True)
        fill(optimizer, torch.float32)
        params[0].decoupled_grad = torch.zeros(7, dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match=r"main_grads_dtype of torch.bfloat16 .*use --main-grads-dtype fp32"):
            optimizer.step()


def test_old_release_without_it_is_refused():
    said = r"use_precision_aware_optimizer=True .*needs Transformer Engine 2\.3"
    without = ("pytorch.optimizers.FusedAdam:exp_avg_dtype",)
    with engine(version="2.1", without=without), pytest.raises(ConfigError, match=said):
        EngineAdam(groups_of(parameters()), BETAS, EPS, True)
