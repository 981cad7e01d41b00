"""fp32 copies of half-precision parameters."""

import pytest
import torch

from megatron.core.optimizer.main_params import MainParams


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_parameters_are_their_own_main_parameters(dtype):
    param = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    assert MainParams([param]).pairs == [(param, param)]


def test_main_gradient_is_used_in_place():
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    param.main_grad = torch.tensor([1.0, 2.0])
    main = MainParams([param])
    (grad,) = main.collect_grads()
    assert grad.data_ptr() == param.main_grad.data_ptr()
    assert main.pairs[0][1].dtype == torch.float32


def test_bf16_main_gradient_is_widened():
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    param.main_grad = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    (grad,) = MainParams([param]).collect_grads()
    assert grad.dtype == torch.float32
    assert grad.tolist() == [1.0, 2.0]


def test_released_gradient_is_not_found_by_backward():
    param = torch.nn.Parameter(torch.ones(2))
    param.main_grad = torch.tensor([1.0, 2.0])
    main = MainParams([param])
    main.collect_grads()
    main.release_grads()
    (param * 3.0).sum().backward()
    assert param.main_grad.tolist() == [1.0, 2.0]


def test_parameter_without_gradient_is_left_out():
    assert MainParams([torch.nn.Parameter(torch.ones(2))]).collect_grads() == []


def test_model_gets_the_rounded_main_values_and_back():
    param = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    main = MainParams([param])
    main.pairs[0][1].data.fill_(1.001)
    main.write_back()
    assert param.item() == 1.0
    param.data.fill_(2.0)
    main.reload()
    assert main.pairs[0][1].item() == 2.0
