"""The half-precision wrapper."""

import pytest
import torch

from megatron.core.transformer.module import Float16Module
from tests.common.small_models import SWIGLU, normal, random_tokens, small_config, small_gpt


def wrapped(kind="bf16", **arguments):
    model = small_gpt(small_config(**{kind: True}, **SWIGLU), **arguments)
    return Float16Module(model.config, model)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_parameters_are_half_and_losses_fp32(kind, dtype):
    module = wrapped(kind)
    tokens, positions, labels = random_tokens()
    assert {param.dtype for param in module.parameters()} == {dtype}
    assert module(tokens, positions, None, labels=labels).dtype == torch.float32
    assert module(tokens, positions, None).dtype == torch.float32


def test_buffers_keep_their_dtype():
    config = small_config(bf16=True)
    inner = torch.nn.Linear(2, 2)
    inner.register_buffer("expert_bias", torch.full((2,), 1.001))
    inner.register_buffer("counts", torch.tensor([40929]))
    Float16Module(config, inner)
    assert inner.weight.dtype == torch.bfloat16
    assert inner.expert_bias.dtype == torch.float32
    assert inner.counts.item() == 40929


def test_router_counts_stay_exact():
    model = small_gpt(
        small_config(
            bf16=True,
            num_moe_experts=4,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            **SWIGLU,
        )
    )
    router = Float16Module(model.config, model).module.decoder.layers[0].mlp.router
    assert router.expert_bias.dtype == torch.float32
    assert not any(buffer.dtype == torch.bfloat16 for buffer in router.buffers())


def test_chunk_in_the_middle_stays_in_half_precision():
    module = wrapped(pre_process=False, post_process=False)
    module.set_input_tensor(normal(8, 2, 32).bfloat16())
    assert module(None, None, None).dtype == torch.bfloat16


def test_full_precision_is_refused():
    with pytest.raises(AssertionError, match="bf16=False, fp16=False"):
        Float16Module(small_config(), torch.nn.Linear(1, 1))
