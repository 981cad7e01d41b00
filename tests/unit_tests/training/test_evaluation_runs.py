"""Evaluation inside whole runs: a whole set on any number of ranks, and several sets with a resume in between (T77)."""

import random
import re

import pytest

from tests.common.broken_ranks import FLAGS
from tests.common.forked_run import run_ranks
from tests.common.token_files import write_tokens

NUM_DOCUMENTS, LENGTH = 39, 17
"""663 tokens make 41 samples of 16: an odd number, so that one of two ranks has none left at the end."""


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(5)
    documents = [[[draw.randrange(31) for _ in range(LENGTH)] for _ in range(NUM_DOCUMENTS)] for _ in range(3)]
    return [write_tokens(folder / f"set{index}", tokens) for index, tokens in enumerate(documents)]


def flags(*words):
    kept = FLAGS.replace("--mock-data", "").replace("--train-iters 500", "").replace("--eval-iters 0", "")
    return [*kept.replace("--global-batch-size 6", "--global-batch-size 2").split(), *map(str, words)]


def validation(output):
    """{(set, iteration): loss} of a log."""
    found = re.findall(r"validation(\S*) loss at iteration (\d+) \| lm loss value: (\S+)", output)
    return {(name, int(step)): float(loss) for name, step, loss in found}


@pytest.mark.parametrize("world_size", [1, pytest.param(2, id="padded")])
def test_full_validation_takes_every_sample_once_on_any_number_of_ranks(prefixes, world_size, record_losses):
    words = ("--train-iters", 2, "--eval-interval", 1, "--eval-iters", 1, "--full-validation", "--lr", 0, "--min-lr", 0)
    data = ("--train-data-path", prefixes[0], "--valid-data-path", prefixes[1])
    result = run_ranks(world_size, flags(*words, *data))[-1]
    assert result.status == 0, result.output[-3000:]
    losses = set(validation(result.output).values())
    assert len(losses) == 1, "the weights stay, so does the loss of the whole set"
    record_losses.append(losses.pop())
    assert record_losses[-1] == pytest.approx(record_losses[0], rel=1e-6)


@pytest.fixture(scope="module")
def record_losses():
    return []


def test_each_validation_set_goes_on_at_its_own_offset_after_a_resume(prefixes, tmp_path):
    data = ("--train-data-path", prefixes[0], "--valid-data-path", prefixes[1], prefixes[2])
    words = ("--multiple-validation-sets", "--eval-interval", 2, "--eval-iters", 2, "--eval-global-batch-size", 4)
    common = flags(*words, *data, "--train-iters", 8)
    straight = validation(run_ranks(1, common)[0].output)
    assert sorted(straight) == [(f"-{index}", step) for index in (0, 1) for step in (2, 4, 6, 8)]
    save = ["--save", str(tmp_path), "--load", str(tmp_path)]
    first = validation(run_ranks(1, [*common, *save, "--exit-interval", "4"])[0].output)
    second = validation(run_ranks(1, [*common, *save])[0].output)
    assert first | second == straight
    assert len(set(straight.values())) == len(straight), "each evaluation has samples of its own"
