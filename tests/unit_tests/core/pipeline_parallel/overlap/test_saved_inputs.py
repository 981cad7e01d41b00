"""What layers declare that autograd keeps, against what it keeps."""

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel.overlap.layer_plan import _INPUTS, _OUTPUTS, DENSE_STAGES, EXCHANGE_STAGES
from megatron.core.pipeline_parallel.overlap.protocol import LayerCall, Stage
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import DISPATCHERS
from tests.common.moe_layers import ep_groups, moe_config
from tests.common.overlapped_model import overlapped_model
from tests.common.small_models import normal


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


def saved_by_autograd(layer, hidden):
    """Run the stages one by one, each with inputs of its own graph; (stage, name) of the inputs that were saved."""
    call, found = LayerCall(), set()
    values = {"hidden": hidden}
    for stage in EXCHANGE_STAGES if layer.has_exchange else DENSE_STAGES:
        inputs = [values.pop(name, None) for name in _INPUTS[stage]]
        inputs = [None if value is None else value.detach().requires_grad_() for value in inputs]
        saved = set()
        with saved_tensors_hooks(lambda tensor, into=saved: into.add(storage_of(tensor)) or tensor, lambda x: x):
            outputs = getattr(layer, stage.value)(*inputs, call)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        values.update(zip(_OUTPUTS[stage], outputs, strict=True))
        for name, value in zip(_INPUTS[stage], inputs, strict=True):
            if name in ("rows", "probs") and value is not None and storage_of(value) in saved:
                found.add((stage, name))
    return found


def assert_declared(layer, dtype):
    width = layer.config.hidden_size
    assert saved_by_autograd(layer, normal(6, 2, width, dtype=dtype)) == layer.saved_inputs()


KINDS = [
    {"moe_grouped_gemm": True},
    {"moe_grouped_gemm": False},
    {"shadow": True},
    {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
]


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("half", [False, True], ids=["fp64", "bf16"])
def test_declaration_of_a_layer_with_experts_is_true(is_shuffled, kind, half):
    model = overlapped_model(is_shuffled=is_shuffled, bf16=half, moe_shared_expert_intermediate_size=8, **kind)
    assert_declared(model.decoder.layers[0], model.config.params_dtype)


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize(
    "fields",
    [
        {"fp8_recipe": "delayed"},
        {"fp8_recipe": "blockwise", "fp8_wgrad": False},
        {"fp8_recipe": "rowwise", "moe_grouped_gemm": False},
        {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0},
    ],
    ids=str,
)
def test_declaration_of_every_layer_of_an_fp8_model_is_true(is_shuffled, fields):
    model = overlapped_model(is_shuffled=is_shuffled, bf16=True, fp8="hybrid", **{"fp8_recipe": "tensorwise"} | fields)
    for layer in model.decoder.layers:
        assert_declared(layer, torch.bfloat16)


@pytest.mark.parametrize("modules", [None, ["layernorm"]], ids=["kept", "norms again"])
def test_declaration_of_a_dense_layer_is_true(modules):
    again = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    model = overlapped_model(moe_layer_freq=[0, 1], **again)
    assert_declared(model.decoder.layers[0], torch.float64)


def declared_on_ranks(dispatcher, num_experts, fields=None):
    """Job: a layer whose experts are spread over all ranks; returns what it declares."""
    config: TransformerConfig = moe_config(
        num_moe_experts=num_experts,
        expert_model_parallel_size=dist.get_world_size(),
        moe_token_dispatcher_type=dispatcher,
        moe_flex_dispatcher_backend="hybridep",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **(fields or {}),
    )
    spec = get_gpt_decoder_block_spec(config)
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8, pg_collection=ep_groups())
    (layer,) = model.decoder.layers
    assert_declared(layer, config.params_dtype)
    return layer.saved_inputs()


@pytest.mark.parametrize("num_experts", [2, 4, 8])
@pytest.mark.parametrize("dispatcher", sorted(DISPATCHERS))
def test_declaration_is_true_on_several_ranks(pool, dispatcher, num_experts):
    pool.run(declared_on_ranks, dispatcher, num_experts)


@pytest.mark.parametrize(
    ("fp8_wgrad", "expected"), [(True, set()), (False, {(Stage.EXPERTS, "rows")})], ids=["codes", "rows"]
)
def test_rows_that_arrive_padded_are_kept_exactly_for_a_weight_gradient_in_high_precision(pool, fp8_wgrad, expected):
    fields = {"bf16": True, "fp8": "hybrid", "fp8_recipe": "rowwise", "fp8_wgrad": fp8_wgrad, "moe_grouped_gemm": True}
    probs = {(Stage.EXPERTS, "probs")}
    assert set(pool.run(declared_on_ranks, "flex", 4, fields)[0]) == expected | probs
