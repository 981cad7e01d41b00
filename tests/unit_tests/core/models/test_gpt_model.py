"""The whole model against the fp64 reference, and its switches."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron.core.errors import ConfigError
from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.tensor_parallel import cross_entropy
from tests.common.reference import Batch, StepResult, assert_matches, make_weights, reference_step
from tests.common.reference_model import GptShape
from tests.common.small_models import SWIGLU, random_tokens, small_config, small_gpt

QKV_BIAS = {"add_bias_linear": False, "add_qkv_bias": True}
RMS = {"normalization": "RMSNorm"}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_pre_softmax": True, **SWIGLU}
CASES = {
    "plain": ({}, {}),
    "learned": ({}, {"position_embedding_type": "learned_absolute"}),
    "none": (RMS, {"position_embedding_type": "none"}),
    "llama": ({**RMS, **SWIGLU, "num_query_groups": 2}, {"rotary_base": 500000, "rope_scaling": True}),
    "qwen": ({**RMS, **SWIGLU, "num_query_groups": 1, "qk_layernorm": True, "kv_channels": 16}, {}),
    "interleaved": ({"rotary_interleaved": True, **QKV_BIAS}, {"rotary_percent": 0.5}),
    "one_plus": ({**RMS, "layernorm_zero_centered_gamma": True, "activation_func": F.silu}, {}),
    "one_plus_layernorm": ({"layernorm_zero_centered_gamma": True, "attention_backend": "unfused"}, {}),
    "tied": (SWIGLU, {"share_embeddings_and_output_weights": True}),
    "dense_then_moe": ({**MOE, "moe_layer_freq": [0, 1]}, {}),
    "moe_then_dense": ({**MOE, "moe_layer_freq": 2}, {}),
    "layer_scaling": ({"apply_query_key_layer_scaling": True}, {}),
}  # fmt: skip


def run_step(model, batch):
    positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    loss = model(batch.tokens, positions, None, labels=batch.labels).mean()
    loss.backward()
    return StepResult(loss.item(), {name: param.grad for name, param in named_global_parameters(model)})


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_equal_the_reference(case):
    fields, arguments = CASES[case]
    config = small_config(**fields)
    shape = GptShape(**arguments)
    weights = make_weights(config, shape, seed=3)
    model = small_gpt(config, **{"position_embedding_type": "rope", **arguments})
    with torch.no_grad():
        for name, param in named_global_parameters(model):
            param.copy_(weights[name])
    batch = Batch.random(2, 8, 32, seed=11)
    reference = reference_step(config, shape, batch, weights, micro_batch_size=2)
    assert_matches(replace(reference, routing_maps={}, tokens_per_expert={}), run_step(model, batch))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    half = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}}.get(dtype, {"params_dtype": dtype})
    model = small_gpt(small_config(**half, **SWIGLU), position_embedding_type="rope")
    tokens, positions, labels = random_tokens()
    losses = model(tokens, positions, None, labels=labels)
    assert losses.shape == (2, 8)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert losses.mean().item() == pytest.approx(math.log(32), rel=0.02)
    losses.mean().backward()
    assert all(param.grad.dtype == dtype and param.grad.isfinite().all() for param in model.parameters())


def test_logits_are_the_output_of_the_linear_layer():
    model = small_gpt(small_config())
    tokens, positions, _ = random_tokens()
    logits = model(tokens, positions, None)
    hidden = model.decoder(model.embedding(tokens, positions))
    assert torch.equal(logits, (hidden @ model.output_layer.weight.T).transpose(0, 1))


def test_padded_vocabulary_changes_neither_loss_nor_gradient():
    models = [small_gpt(small_config(), vocab_size=size, true_vocab_size=27) for size in (27, 32, 128)]
    tokens, positions, labels = random_tokens(vocab_size=27)
    losses = [model(tokens, positions, None, labels=labels) for model in models]
    for model, loss in zip(models, losses, strict=True):
        loss.mean().backward()
        torch.testing.assert_close(loss, losses[0], rtol=1e-12, atol=1e-12)
        gradient = model.output_layer.weight.grad
        torch.testing.assert_close(gradient[:27], models[0].output_layer.weight.grad, rtol=1e-9, atol=1e-15)
        assert (gradient[27:] == 0).all()


def test_table_smaller_than_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"padded_vocab_size=32 with a vocabulary of 33: every token needs a row"):
        small_gpt(small_config(), true_vocab_size=33)


def test_tied_matrix_collects_both_gradients():
    config = small_config(**SWIGLU)
    tied, untied = (small_gpt(config, share_embeddings_and_output_weights=share) for share in (True, False))
    untied.output_layer.weight.data.copy_(untied.embedding.word_embeddings.weight)
    tokens, positions, labels = random_tokens()
    for model in (tied, untied):
        model(tokens, positions, None, labels=labels).mean().backward()
    both = untied.embedding.word_embeddings.weight.grad + untied.output_layer.weight.grad
    torch.testing.assert_close(tied.embedding.word_embeddings.weight.grad, both, rtol=1e-10, atol=1e-15)
    assert tied.shared_embedding_or_output_weight() is tied.embedding.word_embeddings.weight
    assert untied.shared_embedding_or_output_weight() is None


def test_later_tokens_do_not_change_earlier_losses():
    model = small_gpt(small_config(), position_embedding_type="rope")
    tokens, positions, labels = random_tokens()
    changed = tokens.clone()
    changed[:, 5:] = (tokens[:, 5:] + 1) % 32
    first, second = (model(t, positions, None, labels=labels) for t in (tokens, changed))
    torch.testing.assert_close(first[:, :5], second[:, :5], rtol=1e-12, atol=1e-12)
    assert not torch.equal(first[:, 5:], second[:, 5:])


def test_given_mask_cuts_documents_apart():
    model = small_gpt(small_config(), position_embedding_type="none")
    tokens, positions, labels = random_tokens(batch=1)
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    mask[4:, :4] = True
    whole = model(tokens, positions, mask[None, None], labels=labels)
    second = model(tokens[:, 4:], positions[:, 4:], None, labels=labels[:, 4:])
    torch.testing.assert_close(whole[:, 4:], second, rtol=1e-10, atol=1e-12)


def test_decoder_input_replaces_the_embedding():
    model = small_gpt(small_config())
    tokens, positions, labels = random_tokens()
    given = model(None, None, None, decoder_input=model.embedding(tokens, positions), labels=labels)
    assert torch.equal(given, model(tokens, positions, None, labels=labels))


def test_chunks_chained_by_hand_equal_the_whole_model():
    config = small_config()
    first = small_gpt(config, post_process=False, position_embedding_type="rope")
    second = small_gpt(config, pre_process=False, position_embedding_type="rope")
    whole = small_gpt(small_config(num_layers=4), position_embedding_type="rope")
    for i in (0, 1):
        whole.decoder.layers[i].load_state_dict(first.decoder.layers[i].state_dict())
        whole.decoder.layers[i + 2].load_state_dict(second.decoder.layers[i].state_dict())
    tokens, positions, labels = random_tokens()
    second.set_input_tensor([first(tokens, positions, None)])
    assert torch.equal(second(None, None, None, labels=labels), whole(tokens, positions, None, labels=labels))


def test_half_precision_cross_entropy_is_coarser():
    losses = []
    for coarse in (False, True):
        model = small_gpt(small_config(fp16=True, **SWIGLU), fp16_lm_cross_entropy=coarse)
        tokens, positions, labels = random_tokens()
        losses.append(model(tokens, positions, None, labels=labels))
    assert losses[1].dtype == torch.float16
    assert not torch.equal(losses[0], losses[1].float())


@pytest.mark.parametrize("fuses", [False, True])
def test_fused_loss_is_taken_from_the_configuration(monkeypatch, fuses):
    asked = []
    monkeypatch.setattr(cross_entropy, "uses_loss_kernels", lambda *_: asked.append(True))
    tokens, positions, labels = random_tokens()
    small_gpt(small_config(cross_entropy_loss_fusion=fuses))(tokens, positions, None, labels=labels)
    assert bool(asked) == fuses


def test_unknown_position_embedding_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"position_embedding_type='yarn': this model has learned_absolute, rope, none"
    ):
        small_gpt(small_config(), position_embedding_type="yarn")


def test_fp32_residual_starts_at_the_embedding():
    model = small_gpt(small_config(bf16=True, fp32_residual_connection=True, **SWIGLU))
    tokens, positions, labels = random_tokens()
    assert model.embedding(tokens, positions).dtype == torch.float32
    assert model(tokens, positions, None, labels=labels).dtype == torch.float32
