"""The stack of layers."""

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlock
from tests.common.small_models import SWIGLU, normal, small_config

X = normal(5, 2, 32)


def build(config=None, **arguments):
    config = config or small_config()
    return TransformerBlock(config, get_gpt_decoder_block_spec(config), **arguments)


def test_one_layer_spec_is_repeated():
    block = TransformerBlock(small_config(num_layers=3), get_gpt_layer_local_spec())
    assert [layer.layer_number for layer in block.layers] == [1, 2, 3]


def test_block_is_layers_then_norm():
    block = build()
    hidden = X
    for layer in block.layers:
        hidden, _ = layer(hidden)
    assert torch.equal(block(X), block.final_layernorm(hidden))


@pytest.mark.parametrize("freq", [[1, 0], [0, 1], [1, 1], [0, 0]])
def test_final_norm_follows_whatever_the_last_layer_is(freq):
    block = build(small_config(num_moe_experts=2, moe_layer_freq=freq, **SWIGLU))
    assert [layer.has_exchange for layer in block.layers] == [bool(entry) for entry in freq]
    root = torch.sqrt((block(X) ** 2).mean(-1))
    torch.testing.assert_close(root, torch.ones_like(root), rtol=1e-2, atol=0)


def test_chunk_that_does_not_end_the_model_has_no_norm():
    block = build(post_process=False)
    assert block.final_layernorm is None
    assert torch.equal(block(X), block.run_layers(X, None, None, None))


def test_chunk_without_embedding_starts_from_the_set_tensor():
    block = build(pre_process=False)
    with pytest.raises(AssertionError, match="needs set_input_tensor first"):
        block(None)
    block.set_input_tensor(X)
    assert torch.equal(block(None), block.final_norm(block.run_layers(X, None, None, None)))
