"""What is asked of the library, and what is said without it or with an old one."""

import inspect
import re

import pytest

from megatron.core.errors import ConfigError, MissingDependencyError
from megatron.core.extensions.transformer_engine.probe import FEATURES, load_library
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from tests.common import fake_te
from tests.common.engine_runs import engine
from tests.common.fake_te_signatures import TEXTS, VERSION, signature_of
from tests.common.moe_layers import moe_config
from tests.common.small_models import small_config, small_gpt

HALF = {"bf16": True, "fp8": "hybrid"}


def test_without_the_library_the_error_says_how_to_install_it_and_what_runs_without():
    fake_te.uninstall()
    pattern = (
        "transformer_impl='transformer_engine': .*pip install .*transformer-engine.pytorch.*--transformer-impl local"
    )
    with pytest.raises(MissingDependencyError, match=pattern):
        get_gpt_decoder_block_spec(small_config(), use_transformer_engine=True)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_seen_and_its_absence_as_well(feature):
    evidence = FEATURES[feature].evidence
    with engine():
        assert load_library().has(feature)
    if feature != "layers" and FEATURES[feature].evidence.startswith(("pytorch.", "common.recipe.")):
        with engine(version="2.1", without=(evidence,)):
            assert not load_library().has(feature)


@pytest.mark.parametrize(
    ("feature", "fields"),
    [
        ("current_scaling", HALF | {"fp8_recipe": "tensorwise"}),
        ("block_scaling", HALF | {"fp8_recipe": "blockwise"}),
        ("delayed_scaling", HALF | {"fp8_recipe": "delayed"}),
        ("delayed_wgrad", {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}),
    ],
)
def test_old_release_is_refused_with_the_one_that_has_the_feature(feature, fields):
    config = moe_config(**fields, expert_model_parallel_size=2, hidden_dropout=0.0, attention_dropout=0.0)
    config.expert_model_parallel_size = 1
    row = FEATURES[feature]
    with engine(version="2.1", without=(row.evidence,)) as spec:
        rule = re.escape(f"needs Transformer Engine {row.minimum} ({row.evidence}), this is 2.1; {row.below}.")
        with pytest.raises(ConfigError, match=f"=.*: {rule}"):
            small_gpt_of(config, spec)


def small_gpt_of(config, spec):
    return GPTModel(config, spec(config), vocab_size=32, max_sequence_length=16)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fp8_recipe": "rowwise"}, "fp8_recipe='rowwise'"),
        ({"fp8_wgrad": False}, "fp8_wgrad=False"),
        ({"ffn_hidden_size": 24}, "fp8='hybrid' with a matrix of .24, 32. in .*multiples of 16;"),
    ],
)
def test_what_the_library_cannot_do_is_refused(fields, said):
    config = small_config(**HALF | fields)
    with engine() as spec, pytest.raises(ConfigError, match=rf"{said}.*use --"):
        small_gpt_of(config, spec)


def test_stand_in_has_the_signatures_of_the_release():
    with engine():
        library = load_library()
        assert library.version == VERSION
        for name in ("pytorch.Linear", "pytorch.LayerNormLinear", "pytorch.GroupedLinear"):
            assert inspect.signature(library.get(name)) == signature_of(name)
    assert all(signature_of(name).parameters for name in TEXTS)


def test_local_models_do_not_ask_for_the_library():
    fake_te.uninstall()
    assert small_gpt(small_config()) is not None
