"""Linear layers and the word embedding on one rank."""

import pytest
import torch

from megatron.core.param_attrs import InitSpec, param_attrs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.common.small_models import normal, small_config

INIT = InitSpec("normal", 1.0)


def column(**arguments):
    layer = ColumnParallelLinear(3, 4, config=small_config(), init_method=INIT, **arguments)
    if layer.bias is not None:
        layer.bias.data.copy_(normal(4, seed=9))
    return layer


def row(**arguments):
    return RowParallelLinear(
        3,
        4,
        config=small_config(),
        init_method=INIT,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        **arguments,
    )


def test_column_parallel_multiplies_and_adds():
    layer, x = column(), normal(5, 2, 3)
    output, bias = layer(x)
    torch.testing.assert_close(output, torch.einsum("sbi,oi->sbo", x, layer.weight) + layer.bias)
    assert bias is None


def test_skipped_bias_is_returned():
    layer, x = column(skip_bias_add=True), normal(5, 2, 3)
    output, bias = layer(x)
    torch.testing.assert_close(output + bias, torch.einsum("sbi,oi->sbo", x, layer.weight) + layer.bias)
    assert bias is layer.bias


def test_layer_without_weight_uses_the_one_it_is_given():
    layer, x, weight = column(skip_weight_param_allocation=True, bias=False), normal(1, 1, 3), normal(4, 3, seed=2)
    torch.testing.assert_close(layer(x, weight=weight)[0], x @ weight.T)
    with pytest.raises(AssertionError, match=r"\[4, 3\] was given no weight"):
        layer(x)


def test_partition_attributes():
    gated, dense = column(stride=2), row()
    assert param_attrs(gated.weight).full_shape == (4, 3)
    assert (gated.weight.partition_dim, gated.weight.partition_stride) == (0, 2)
    assert (gated.bias.partition_dim, dense.weight.partition_dim) == (0, 1)
    assert not dense.bias.tensor_model_parallel
    assert row(is_expert=True).weight.allreduce is False


def test_embedding_looks_up_and_accumulates_repeated_ids():
    ids = torch.tensor([[1, 1, 0]])
    for deterministic in (False, True):
        config = small_config(deterministic_mode=deterministic)
        table = VocabParallelEmbedding(4, 3, init_method=INIT, config=config)
        output = table(ids)
        assert torch.equal(output[0, 2], table.weight[0])
        output.sum().backward()
        assert table.weight.grad[:, 0].tolist() == [1.0, 2.0, 0.0, 0.0]
        assert table.weight.is_embedding_or_output_parameter
