"""--yaml-cfg: a file of flags behaves like a command line."""

import pytest

from megatron.core.errors import ConfigError
from megatron.training.arguments import parse_args

TINY = """
model:
  num_layers: 4
  hidden_size: 96
  num-attention-heads: 6
  num_experts: 8
  moe_layer_freq: [1, 0, 1, 0]
  add_bias_linear: false
seq_length: 32
max_position_embeddings: 32
training: {micro_batch_size: 2, train_iters: 5, lr: 1.0e-3, fp16: false, bf16: true}
rampup_batch_size: null
mock_data: true
tokenizer_type: ByteTokenizer
"""


def parse(tmp_path, text, *words):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return parse_args(["--yaml-cfg", str(path), *words])


def test_file_gives_the_values(tmp_path):
    args = parse(tmp_path, TINY)
    assert (args.num_layers, args.num_experts, args.moe_layer_freq) == (4, 8, [1, 0, 1, 0])
    assert (args.add_bias_linear, args.bf16, args.fp16, args.lr) == (False, True, False, 0.001)


def test_command_line_has_the_last_word(tmp_path):
    assert parse(tmp_path, TINY, "--lr", "0.5").lr == 0.5


def test_negative_switch_by_its_own_name(tmp_path):
    text = TINY.replace("add_bias_linear: false", "disable-bias-linear: true")
    assert parse(tmp_path, text).add_bias_linear is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TINY + "bogus_key: 3\n", "--bogus-key: unknown flag"),
        (TINY.replace("ByteTokenizer", "ByteToken"), "tokenizer_type='ByteToken': none of"),
        ("- 1\n", "holds no mapping"),
        ("a: [\n", "cannot be read"),
    ],
    ids=["unknown key", "unknown value", "no mapping", "no YAML"],
)
def test_broken_file_is_an_error(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, text)


def test_absent_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_args(["--yaml-cfg", str(tmp_path / "absent.yaml")])
