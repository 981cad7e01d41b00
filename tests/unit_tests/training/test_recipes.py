"""The recipes of README.md: each flag is taken, and each line trains."""

import re
import subprocess
from pathlib import Path

import pytest

from megatron.training.arguments import parse_args
from tests.common.forked_run import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def recipes() -> dict[str, str]:
    """Feature and `N FLAGS`, from the table of README.md."""
    section = (ROOT / "README.md").read_text().split("## Recipes")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| ([^|`]+) \| `(\d [^`]+)` \|", section, re.MULTILINE))


def command_line(recipe: str) -> tuple[int, list[str]]:
    """What examples/try.sh would start: number of processes, words behind pretrain_gpt.py."""
    script = ["bash", str(ROOT / "examples" / "try.sh"), *recipe.split()]
    words = subprocess.run(script, env={"PATH": "/usr/bin:/bin", "PYTHON": "echo"}, capture_output=True, text=True)
    launcher, flags = words.stdout.split("pretrain_gpt.py")
    return int(launcher.split()[-1]), flags.split()


def test_readme_has_recipes():
    assert len(recipes()) >= 10


@pytest.mark.parametrize("feature", sorted(recipes()))
def test_recipe_is_accepted(feature, monkeypatch):
    world_size, argv = command_line(recipes()[feature])
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert parse_args(argv).world_size == world_size


@pytest.mark.full
@pytest.mark.parametrize("feature", sorted(recipes()))
def test_recipe_trains(feature):
    results = run_ranks(*command_line(recipes()[feature]))
    assert [result.status for result in results] == [0] * len(results), results[0].output
    assert len(results[-1].losses() or results[0].losses()) == 2
