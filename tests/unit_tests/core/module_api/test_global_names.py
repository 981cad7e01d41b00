"""Names of parameters in the unsharded model."""

import torch

from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.transformer.module import Float16Module
from tests.common.reference_model import GptShape, parameter_shapes
from tests.common.small_models import small_config, small_gpt


def test_gpt_has_the_canonical_names_and_shapes():
    config = small_config(qk_layernorm=True, num_query_groups=2)
    model = small_gpt(config, position_embedding_type="learned_absolute")
    expected = parameter_shapes(config, GptShape(position_embedding_type="learned_absolute"))
    assert {name: tuple(param.shape) for name, param in named_global_parameters(model)} == expected


def test_tied_output_layer_has_no_name_of_its_own():
    names = [
        name for name, _ in named_global_parameters(small_gpt(small_config(), share_embeddings_and_output_weights=True))
    ]
    assert "embedding.word_embeddings.weight" in names
    assert "output_layer.weight" not in names


def test_shared_parameter_appears_once_by_its_first_name():
    first, second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    root = torch.nn.ModuleDict({"first": first, "second": second})
    assert [name for name, _ in named_global_parameters(root)] == ["first.weight"]


def test_wrapper_adds_no_level():
    model = small_gpt(small_config(bf16=True))
    inner = [name for name, _ in named_global_parameters(model)]
    assert [name for name, _ in named_global_parameters(Float16Module(model.config, model))] == inner


def test_container_maps_local_numbers_to_global_ones():
    class Stage(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])

        def global_name(self, local_name):
            return local_name.replace("layers.0.", "layers.6.")

    root = torch.nn.ModuleDict({"decoder": Stage()})
    assert [name for name, _ in named_global_parameters(root)] == ["decoder.layers.6.weight"]
