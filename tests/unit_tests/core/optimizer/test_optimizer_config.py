"""Rules of the optimizer's configuration."""

import pytest

from megatron.core.errors import ConfigError
from megatron.core.optimizer import OptimizerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bf16": True, "fp16": True}, "bf16=True with fp16=True: a run has one compute precision"),
        ({"lr": 0.1, "min_lr": 0.2}, "min_lr=0.2 with lr=0.1: the rate decays to min_lr"),
        ({"decoupled_min_lr": 0.1}, "decoupled_min_lr=0.1 with decoupled_lr=None: it bounds a rate that is not set"),
        ({"decoupled_lr": 0.1, "decoupled_min_lr": 0.2}, "decoupled_min_lr=0.2 with decoupled_lr=0.1"),
        ({"adam_beta2": 1.0}, "adam_beta2=1.0: must lie in [0, 1)"),
        ({"clip_grad": -1.0}, "clip_grad=-1.0: must not be negative"),
        ({"hysteresis": 0}, "hysteresis=0: must be positive"),
        (
            {"initial_loss_scale": 0.5},
            "min_loss_scale=1.0 with initial_loss_scale=0.5: the scale starts above its floor",
        ),
    ],
)
def test_broken_rule_names_fields_and_values(fields, message):
    with pytest.raises(ConfigError) as error:
        OptimizerConfig(**fields)
    assert message in str(error.value)
