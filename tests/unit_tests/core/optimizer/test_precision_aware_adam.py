"""Moments and gradients in bf16."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, precision_aware_adam
from megatron.core.optimizer.precision_aware_adam import PrecisionAwareAdam


def one_step(moment, grad):
    """A parameter of one, moments that start at zero in the dtype `moment`; lr 0.5, no decay, beta 0.9 and 0.99."""
    param = torch.nn.Parameter(torch.ones(1))
    group = {"params": [param], "lr": 0.5, "weight_decay": 0.0}
    optimizer = PrecisionAwareAdam([group], (0.9, 0.99), 1e-8, is_weight_decay_decoupled=True)
    state = {key: torch.zeros(1, dtype=moment) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[param] = {"step": torch.zeros(()), **state}
    param.decoupled_grad = grad
    optimizer.step()
    return param, optimizer.state[param]


class HostReads(TorchDispatchMode):
    """How often a number is read from a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_steps_beside_the_kernel_are_counted_without_a_host_read(monkeypatch):
    monkeypatch.setattr(precision_aware_adam, "has_adam_kernel", lambda tensors: True)
    monkeypatch.setattr(precision_aware_adam, "adam_step", lambda *args: None)
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = PrecisionAwareAdam(
        [{"params": [param], "lr": torch.tensor(0.5), "weight_decay": 0.0}], (0.9, 0.99), 1e-8, True
    )
    optimizer.state[param] = {"step": torch.zeros(()), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    param.decoupled_grad = torch.ones(1)
    for raised, steps in ((0.0, 1.0), (1.0, 1.0), (0.0, 2.0)):
        optimizer.found_inf = torch.tensor(raised)
        with HostReads() as reads:
            optimizer.step()
        assert reads.count == 0
        assert optimizer.state[param]["step"].item() == steps


def test_first_step_moves_by_the_rate_and_rounds_the_moments():
    """0.1 and 0.01 times 1.0 in bf16 are 0.10009765625 and 0.010009765625."""
    param, state = one_step(torch.bfloat16, torch.ones(1, dtype=torch.bfloat16))
    assert param.item() == pytest.approx(0.5, abs=1e-6)
    assert state["exp_avg"].tolist() == [0.10009765625]
    assert state["exp_avg_sq"].tolist() == [0.010009765625]
    assert state["step"].item() == 1.0


def test_parameter_without_gradient_is_left_alone():
    param, state = one_step(torch.float32, None)
    assert (param.item(), state["step"].item()) == (1.0, 0.0)


def test_dtypes_are_those_of_the_configuration():
    module = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, main_grads_dtype="bf16")
    chunk = DistributedDataParallel(ModelParallelConfig(), ddp_config, module)
    config = OptimizerConfig(
        lr=0.1,
        bf16=True,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        main_grads_dtype="bf16",
        exp_avg_dtype="bf16",
    )
    (_, _, tensors, _), _ = get_megatron_optimizer(config, [chunk]).named_state()
    assert module.weight.main_grad.dtype == torch.bfloat16
    assert {key: tensor.dtype for key, tensor in tensors.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.float32,
        "main_param": torch.float32,
    }


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"exp_avg_dtype": "bf16"}, "exp_avg_dtype='bf16' with use_precision_aware_optimizer=False: other optimizers"),
        ({"use_precision_aware_optimizer": True}, "with use_distributed_optimizer=False: it updates shards"),
        (
            {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True, "optimizer": "sgd"},
            "use_precision_aware_optimizer=True with optimizer='sgd': it is a form of Adam",
        ),
        (
            {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True, "main_grads_dtype": "bf16"},
            "main_grads_dtype='bf16' with bf16=False: gradients of a bf16 model only",
        ),
    ],
)
def test_precision_without_its_conditions_is_refused(fields, text):
    with pytest.raises(ConfigError) as error:
        OptimizerConfig(lr=0.1, **fields)
    assert text in str(error.value)


def test_two_accumulation_dtypes_are_refused():
    with pytest.raises(ConfigError, match="grad_reduce_in_fp32=True with main_grads_dtype='bf16'"):
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, main_grads_dtype="bf16")
