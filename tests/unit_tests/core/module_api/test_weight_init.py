"""Initial weights depend on seed and global name alone."""

import math

import pytest
import torch

from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.module_api.weight_init import draw_full_tensor, generator_seed, initialize_weights, local_slice
from megatron.core.param_attrs import InitSpec, ParamAttrs, set_param_attrs
from megatron.core.tensor_parallel import random as rng
from tests.common.small_models import SWIGLU, small_config, small_gpt

CPU = torch.device("cpu")
NORMAL = InitSpec("normal", 0.02)


@pytest.fixture(autouse=True)
def _forget_random_state():
    rng.reset()
    yield
    rng.reset()


def weights(model):
    return {name: param.detach().clone() for name, param in named_global_parameters(model)}


def test_generator_seed_is_the_crc_of_seed_and_name():
    assert generator_seed("output_layer.weight", 1234) == 0x745951E3


def test_weights_do_not_depend_on_the_number_of_layers():
    small, large = (weights(small_gpt(small_config(num_layers=n))) for n in (2, 4))
    same = [name for name in small if not name.endswith(("linear_proj.weight", "linear_fc2.weight"))]
    assert all(torch.equal(small[name], large[name]) for name in same)
    # Matrices that write to the residual stream have the same draws, scaled by 1 / sqrt(2 * num_layers).
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    torch.testing.assert_close(small[name], large[name] * math.sqrt(2), rtol=1e-6, atol=0)


def test_layers_and_matrices_differ_from_each_other():
    drawn = weights(small_gpt(small_config()))
    qkv = [drawn[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] for layer in (0, 1)]
    assert not torch.equal(*qkv)


def test_another_seed_gives_other_weights():
    first = weights(small_gpt(small_config()))
    rng.set_base_seed(7)
    second = weights(small_gpt(small_config()))
    name = "embedding.word_embeddings.weight"
    assert not torch.equal(first[name], second[name])


def test_construction_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    small_gpt(small_config())
    assert torch.equal(torch.get_rng_state(), before)


def test_low_precision_is_the_rounded_fp32_draw():
    wide = weights(small_gpt(small_config(params_dtype=torch.float32)))
    narrow = weights(small_gpt(small_config(bf16=True)))
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)


@pytest.mark.parametrize("width", [16, 5])
def test_real_vocabulary_rows_do_not_depend_on_padding(width):
    sizes = (50257 // 100, 50304 // 100, 51200 // 100)
    tables = [draw_full_tensor(ParamAttrs(NORMAL), (rows, width), 3, CPU) for rows in sizes]
    assert torch.equal(tables[0], tables[1][: sizes[0]])
    assert torch.equal(tables[0], tables[2][: sizes[0]])


def test_slices_of_gated_matrix_cut_gate_and_up_separately():
    full = torch.arange(8.0).view(8, 1)
    attrs = [ParamAttrs(NORMAL, partition_dim=0, num_parts=2, partition_rank=rank) for rank in (0, 1)]
    assert local_slice(full, (4, 1), attrs[0]).flatten().tolist() == [0, 1, 4, 5]
    assert local_slice(full, (4, 1), attrs[1]).flatten().tolist() == [2, 3, 6, 7]


def test_rank_holds_its_slice_of_the_whole_draw():
    def shard(rank, size):
        module = torch.nn.Module()
        attrs = ParamAttrs(NORMAL, partition_dim=1, partition_rank=rank, full_shape=(6, 8))
        module.weight = set_param_attrs(torch.nn.Parameter(torch.empty(6, 8 // size)), attrs)
        initialize_weights(module, 1)
        return module.weight

    assert torch.equal(torch.cat([shard(0, 2), shard(1, 2)], 1), shard(0, 1))


def test_distributions_have_the_configured_width():
    drawn = weights(small_gpt(small_config(init_method_std=0.5, hidden_size=64)))
    at = "decoder.layers.0"
    assert drawn[f"{at}.mlp.linear_fc1.weight"].std().item() == pytest.approx(0.5, rel=0.03)
    assert drawn[f"{at}.mlp.linear_fc2.weight"].std().item() == pytest.approx(0.25, rel=0.03)
    assert drawn[f"{at}.self_attention.linear_proj.weight"].std().item() == pytest.approx(0.25, rel=0.03)
    assert (drawn[f"{at}.mlp.linear_fc1.bias"] == 0).all()
    assert (drawn[f"{at}.input_layernorm.weight"] == 1).all()


def test_zero_centred_norm_starts_at_zero():
    drawn = weights(small_gpt(small_config(layernorm_zero_centered_gamma=True)))
    assert (drawn["decoder.final_layernorm.weight"] == 0).all()


def test_custom_initialiser_sees_the_whole_fp32_tensor_and_a_seeded_generator():
    def ramp(tensor):
        tensor.uniform_(1.0, 2.0)

    config = small_config(init_method=ramp, **SWIGLU)
    before = torch.get_rng_state()
    first, second = (weights(small_gpt(config)) for _ in range(2))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(first[name], second[name])
    assert first[name].min() >= 1.0
    assert torch.equal(torch.get_rng_state(), before)
