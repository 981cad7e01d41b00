"""The state hash: sensitive to every bit, blind to layout."""

import pytest
import torch

from megatron.core.optimizer.optimizer import ParamState
from megatron.training.state_hash import combine, state_hash, tensor_digest


class FakeOptimizer:
    """Stands in for the optimizer's view of its state."""

    def __init__(self, params):
        self.params = params

    def whole_state(self):
        for name, param in self.params.items():
            yield ParamState(name, param, {"main_grad": param.main_grad, "exp_avg": param.exp_avg})


def build_state():
    params = {}
    for name in ("a", "b"):
        param = torch.nn.Parameter(torch.arange(4.0))
        param.main_grad = torch.ones(4)
        param.exp_avg = torch.zeros(4)
        params[name] = param
    model = torch.nn.Module()
    model.register_buffer("expert_bias", torch.zeros(2))
    return params, model


def hash_of(params, model):
    return state_hash([model], FakeOptimizer(params))


@pytest.mark.parametrize("which", ["weight", "main_grad", "exp_avg", "buffer"])
def test_one_changed_bit_changes_the_hash(which):
    params, model = build_state()
    before = hash_of(params, model)
    tensor = {
        "weight": params["a"].data,
        "main_grad": params["a"].main_grad,
        "exp_avg": params["a"].exp_avg,
        "buffer": model.expert_bias,
    }[which]
    tensor.view(torch.uint8)[0] ^= 1
    assert hash_of(params, model) != before
    assert len(before) == 16


def test_order_of_parameters_and_buffer_layout_do_not_matter():
    params, model = build_state()
    before = hash_of(params, model)
    flat = torch.cat([torch.full((3,), 7.0), params["a"].main_grad])
    params["a"].main_grad = flat[3:]
    assert hash_of(dict(reversed(params.items())), model) == before


def test_negative_zero_and_dtype_count():
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    assert tensor_digest(torch.zeros(2, dtype=torch.int32)) != tensor_digest(torch.zeros(1, dtype=torch.int64))


def test_replicas_collapse_only_if_equal():
    whole = combine([{"x": "1", "y": "2"}])
    assert combine([{"x": "1"}, {"x": "1", "y": "2"}]) == whole
    assert combine([{"x": "1", "y": "2"}, {"x": "3"}]) != whole
