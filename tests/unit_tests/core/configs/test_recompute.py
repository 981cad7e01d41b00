"""The topic of activation recompute: which fields belong together, and which layers form a span."""

import pytest

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.tensor_parallel.recompute import layer_spans, recomputes

SIZES = {"num_layers": 5, "hidden_size": 8, "num_attention_heads": 2}


def config(**fields):
    return TransformerConfig(**SIZES, **fields)


def full(method, count):
    return config(recompute_granularity="full", recompute_method=method, recompute_num_layers=count)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"recompute_granularity": "full"}, "recompute_granularity='full' with recompute_method=None: whole layers"),
        ({"recompute_method": "block"}, "recompute_method='block' with recompute_granularity=None: it chooses whole"),
        ({"recompute_num_layers": 2, "recompute_granularity": "selective"}, "recompute_num_layers=2 with recompute_g"),
        ({"recompute_modules": ["mlp"]}, "recompute_granularity=None: modules are parts of selective recompute"),
        ({"recompute_modules": ["mpl"], "recompute_granularity": "selective"}, "did you mean mlp"),
        ({"distribute_saved_activations": True}, "only inputs of whole layers are distributed"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_fields_that_do_not_belong_together_are_refused(fields, text):
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        config(**fields)


def test_a_group_has_layers():
    with pytest.raises(ConfigError, match="recompute_num_layers=0: a number of layers"):
        full("uniform", 0)


def test_selective_starts_with_attention():
    chosen = config(recompute_granularity="selective")
    assert recomputes(chosen, "core_attn")
    assert not recomputes(chosen, "mlp")
    assert not recomputes(config(), "core_attn")


@pytest.mark.parametrize(
    ("made", "spans"),
    [
        (config(), [(range(5), False)]),
        (full("uniform", 2), [(range(2), True), (range(2, 4), True), (range(4, 5), True)]),
        (full("block", 2), [(range(1), True), (range(1, 2), True), (range(2, 5), False)]),
        (full("block", 9), [(range(i, i + 1), True) for i in range(5)]),
    ],
    ids=["off", "uniform", "block", "block_of_all"],
)
def test_layers_form_spans(made, spans):
    assert layer_spans(made, 5) == spans
