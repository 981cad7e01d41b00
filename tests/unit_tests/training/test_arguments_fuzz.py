"""Every flag with values that no run can have: one line each names the field, its value, the rule and the remedy."""

import re
import sys

import pytest

import pretrain_gpt
from megatron.core.configs.flag_spec import flag_specs
from megatron.core.errors import ConfigError
from megatron.training import arguments
from megatron.training.argument_factory import TOPICS, build_parser
from tests.common.training_runs import fresh_program

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 32 "
    "--device cpu --num-experts 4 --moe-token-dispatcher-type alltoall --eval-iters 1 --num-workers 0 "
)
ODD_WORDS = ("0", "-1", "99999999999999999999", "9000000000000000000", "1e400", "nan", "x", "", "-0.5", "1.5", "\x00")
PROBLEM = re.compile(r"(\w+=.*: .+; .+)|(command line: .+; --help lists all flags)", re.DOTALL)
SPECS = {
    spec.dest: build_parser().specs[spec.spellings[0]]
    for topic in TOPICS.values()
    for spec in flag_specs(topic)
    if not spec.is_switch
}


def judged(spec, word):
    """The problems of one flag with one word; none if it is accepted."""
    flag, count = spec.spellings[0], spec.nargs if isinstance(spec.nargs, int) else 1
    words = [f"{flag}={word}"] if count == 1 else [flag, *[word] * count]
    try:
        arguments.parse_args([*BASE.split(), *words])
    except ConfigError as error:
        return str(error).split("\n")
    return []


@pytest.mark.full
@pytest.mark.parametrize("word", ODD_WORDS, ids=repr)
def test_odd_value_of_any_flag_is_accepted_or_refused_in_its_line(word):
    for spec in SPECS.values():
        problems = judged(spec, word)
        assert all(PROBLEM.fullmatch(line) for line in problems), (spec.spellings, problems)
        assert not problems or any(name in problems[0] for name in (spec.dest, spec.field, spec.spellings[0]))


@pytest.mark.full
def test_wrong_word_of_any_choice_is_answered_with_the_choices():
    for spec in SPECS.values():
        if spec.choices and spec.type is str:
            (line,) = judged(spec, "nonsense")
            assert f"{spec.dest}='nonsense'" in line or f"{spec.dest}=nonsense" in line
            assert str(spec.choices[0]) in line


@pytest.mark.full
def test_text_in_place_of_any_number_is_refused():
    numbers = [spec for spec in SPECS.values() if spec.type in (int, float) and not spec.choices]
    assert len(numbers) > 90
    for spec in numbers:
        (line,) = judged(spec, "x")
        assert line.startswith(f"{spec.dest}=")
        assert "; give " in line


PATHS = {
    "data": "--data-path {}",
    "training data": "--train-data-path {}",
    "blend": "--data-path 0.5 {}",
    "blend file": "--data-args-path {}",
    "blend file per split": "--per-split-data-args-path {}",
    "launch file": "--mock-data --yaml-cfg {}",
    "pretrained": "--mock-data --pretrained-checkpoint {}",
    "vocabulary": "--mock-data --tokenizer-type GPT2BPETokenizer --vocab-file {} --merge-file {}",
    "checkpoint of arguments": "--mock-data --use-checkpoint-args --exit-on-missing-checkpoint --load {}",
    "checkpoint": "--mock-data --exit-on-missing-checkpoint --load {}",
    **{
        kind: f"--mock-data --tokenizer-type {kind} --tokenizer-model {{}}"
        for kind in ("SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
    },
}


@pytest.fixture
def bad_paths(tmp_path):
    """Nothing, an empty folder, an empty file, a file of other bytes; an absolute path that no user may read."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    return [tmp_path / name for name in ("nothing", "folder", "empty", "bytes")] + ["/proc/1/mem"]


@pytest.mark.full
@pytest.mark.parametrize("kind", PATHS)
def test_path_that_leads_nowhere_ends_in_a_line(kind, bad_paths, monkeypatch, capsys):
    base = BASE.replace("--mock-data ", "")
    for path in bad_paths:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *base.split(), *PATHS[kind].format(path, path).split()])
        with fresh_program():
            assert pretrain_gpt.main() in (1, 2), path
        (line,) = [line for line in capsys.readouterr().err.splitlines() if re.match(r"\w+Error: ", line)]
        assert str(path) in line
        assert "; " in line
