"""Building modules from specs."""

import pytest
import torch

from megatron.core.transformer.spec_utils import ModuleSpec, build_module


def test_class_is_built_with_the_callers_arguments():
    assert build_module(torch.nn.Linear, 3, out_features=2).weight.shape == (2, 3)


def test_params_of_the_spec_are_added_and_the_caller_wins():
    spec = ModuleSpec(torch.nn.Linear, params={"bias": False, "out_features": 9})
    built = build_module(spec, 3, out_features=2)
    assert built.bias is None
    assert built.out_features == 2


def test_path_is_imported_when_the_module_is_built():
    assert isinstance(build_module(ModuleSpec(("torch.nn", "ReLU"))), torch.nn.ReLU)


def test_function_is_returned_as_it_is():
    def function():
        raise AssertionError("must not be called")

    assert build_module(function) is function


def test_submodules_reach_the_constructor():
    class Layer:
        def __init__(self, submodules):
            self.submodules = submodules

    assert build_module(ModuleSpec(Layer, submodules="parts")).submodules == "parts"


def test_wrong_argument_is_reported_with_the_class_in_front():
    with pytest.raises(TypeError, match=r"Linear: .*'widht'"):
        build_module(torch.nn.Linear, 3, 2, widht=1)
