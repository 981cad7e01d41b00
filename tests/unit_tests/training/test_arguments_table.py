"""Every flag of the reference parser is there, with its default; our own flags are a frozen list."""

import pytest

from megatron.training.argument_factory import build_parser, read_command_line
from megatron.training.arguments import fill_defaults
from megatron.training.check_config import judge_flag_table
from megatron.training.flag_table import FEATURES, VALUES
from megatron.training.legacy_flags import ALIASES
from tests.unit_tests.training.reference_flags import DEFAULTS

PARSER = build_parser()
# auto takes what is installed; unset means fp32 unless told otherwise; a key that does not fit is an error.
OTHER_DEFAULTS = {
    "--transformer-impl": "auto",
    "--accumulate-allreduce-grads-in-fp32": None,
    "--dist-ckpt-strictness": "raise_all",
}
SEVERAL = {"--cp-comm-type", "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"}
OURS = {
    "--device",
    "--init-device",
    "--explain-config",
    "--world-size",
    "--moe-hybridep-engine",
    "--moe-rank-capacity-tiers",
    "--log-state-hash",
    "--log-overlap",
    "--check-streams",
    "--verify-resume",
    "--ckpt-fallback",
}
OUTSIDE_THE_TABLE = [
    "--cpu-offloading-num-layers",
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
    "--fine-grained-activation-offloading",
    "--offload-modules",
    "--muon-momentum",
    "--muon-scale-mode",
    "--muon-extra-scale-factor",
    "--no-use-layer-wise-param-layout",
    "--tp-comm-overlap",
    "--no-weight-decay-cond-type",
    "--async-ckpt-use-cpu-shm",
    "--verify-integrity",
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "--outer-dp-sharding-strategy",
    "--megatron-fsdp-main-params-dtype",
    "--megatron-fsdp-main-grads-dtype",
    "--megatron-fsdp-grad-comm-dtype",
    "--hybrid-override-pattern",
    "--hybrid-layer-pattern",
    "--is-hybrid-model",
    "--mamba-head-dim",
    "--mamba-num-groups",
    "--mamba-num-heads",
    "--mamba-state-dim",
    "--linear-attention-freq",
    "--linear-conv-kernel-dim",
    "--linear-key-head-dim",
    "--linear-num-key-heads",
    "--linear-num-value-heads",
    "--linear-value-head-dim",
    "--attention-output-gate",
    "--mrope-section",
    "--img-h",
    "--img-w",
    "--patch-dim",
    "--decoder-seq-length",
    "--no-data-sharding",
    "--no-gradient-reduce-div-fusion",
    "--no-barrier-with-level-1-timing",
    "--no-initialization",
    "--no-pad-vocab-size",
    "--no-one-logger",
    "--no-tp-comm-bulk-dgrad",
    "--no-tp-comm-bulk-wgrad",
    "--no-pin-cpu-grads",
    "--no-pin-cpu-params",
    "--checkpoint-activations",
    "--apply-wd-to-qk-layernorm",
    "--eval-micro-batch-size",
    "--eval-global-batch-size",
]


def sample_words(spec):
    """Words that differ from the default, for any flag."""
    if spec.is_switch:
        return []
    if spec.choices:
        usual = spec.default if isinstance(spec.default, list) else [spec.default]
        return [str(next(choice for choice in spec.choices if choice not in usual))]
    word = "7" if spec.type in (int, float) or spec.type.__name__ == "int_or_list" else "word"
    return [word] * (spec.nargs if isinstance(spec.nargs, int) else 1)


@pytest.mark.parametrize("flag", DEFAULTS)
def test_flag_of_the_reference_has_its_default(flag):
    expected = OTHER_DEFAULTS.get(flag, DEFAULTS[flag])
    default = PARSER.specs[flag].default
    assert default == ([expected] if flag in SEVERAL and isinstance(default, list) else expected)


@pytest.mark.parametrize("flag", list(DEFAULTS) + OUTSIDE_THE_TABLE + sorted(OURS))
def test_flag_acts_or_is_answered_by_name(flag):
    spec = PARSER.specs[flag]
    given = read_command_line(PARSER, [flag, *sample_words(spec)])
    rows = {row for feature in FEATURES for item in feature.flags for row in item.spellings}
    refused = judge_flag_table(fill_defaults(PARSER, given), given)
    if flag in rows:
        assert any(flag in line for line in refused + given.notices)
    elif spec in [alias.flag for alias in ALIASES]:
        assert any(flag in line for line in given.notices)
    else:
        assert given.spellings == {spec.dest: flag}


def test_own_flags_are_a_frozen_list():
    assert set(PARSER.specs) - set(DEFAULTS) - set(OUTSIDE_THE_TABLE) == OURS


@pytest.mark.parametrize("row", VALUES, ids=lambda row: row.dest)
def test_known_value_that_is_missing_is_refused_with_its_feature(row):
    flag = next(spec.spellings[0] for spec in PARSER.specs.values() if spec.dest == row.dest)
    given = read_command_line(PARSER, [flag, row.values[0]])
    assert row.feature in given.problems[0]
    assert flag in given.problems[0]


@pytest.mark.parametrize("feature", [item for item in FEATURES if item.status != "no_effect" and not item.strict])
def test_inert_values_of_missing_features_are_accepted(feature):
    for spec in feature.flags:
        if spec.is_switch or spec.default in (None, []):
            continue
        words = spec.default if isinstance(spec.default, list) else [spec.default]
        given = read_command_line(PARSER, [spec.spellings[0], *map(str, words)])
        assert judge_flag_table(fill_defaults(PARSER, given), given) == []


def test_no_row_of_the_flag_table_is_a_field_too():
    fields = [spec.spellings for spec in PARSER.specs.values() if spec.field]
    rows = [spec.spellings for feature in FEATURES for spec in feature.flags]
    assert not set(fields) & set(rows)
