"""The outermost constructor initialises the tree, once."""

import pytest
import torch

from megatron.core.module_api.module import MegatronModule
from megatron.core.param_attrs import awaits_init
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import Float16Module
from tests.common.small_models import small_config, small_gpt


def test_standalone_mlp_is_ready_after_construction():
    mlp = MLP(small_config(), MLPSubmodules())
    assert not any(awaits_init(param) for param in mlp.parameters())
    assert mlp.linear_fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_inner_constructors_leave_the_weights_alone():
    seen = []

    class Outer(MegatronModule):
        def __init__(self, config):
            super().__init__(config)
            self.mlp = MLP(config, MLPSubmodules())
            seen.append(awaits_init(self.mlp.linear_fc1.weight))

    outer = Outer(small_config())
    assert seen == [True]
    assert not awaits_init(outer.mlp.linear_fc1.weight)


def test_failed_constructor_does_not_block_the_next():
    class Broken(MegatronModule):
        def __init__(self, config):
            super().__init__(config)
            raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        Broken(small_config())
    assert not awaits_init(MLP(small_config(), MLPSubmodules()).linear_fc1.weight)


def test_wrapper_does_not_draw_again():
    model = small_gpt(small_config(bf16=True))
    with torch.no_grad():
        model.embedding.word_embeddings.weight.fill_(3.0)
    Float16Module(model.config, model)
    assert (model.embedding.word_embeddings.weight == 3.0).all()


def test_initialization_can_be_switched_off():
    mlp = MLP(small_config(perform_initialization=False), MLPSubmodules())
    assert awaits_init(mlp.linear_fc1.weight)
