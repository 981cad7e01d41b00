"""The rules of the house that a machine can check, over the whole checkout.

Each gate is proved able to fail in test_architecture_seeded.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.unit_tests.architecture.gates import GATES, read_waivers, unused, unwaived
from tests.unit_tests.architecture.gates_size import long_files
from tests.unit_tests.architecture.source import Tree

ROOT = Path(__file__).parents[2]
TREE = Tree(ROOT)
WAIVERS = read_waivers(Path(__file__).with_name("architecture_waivers.txt"))


@pytest.mark.parametrize("gate", GATES)
def test_gate_holds(gate):
    findings = unwaived(gate, GATES[gate](TREE), WAIVERS)
    assert not findings, f"{len(findings)} violations of '{gate}':\n" + "\n".join(map(str, findings))


def test_every_waiver_is_needed():
    idle = unused(TREE, WAIVERS)
    assert not idle, "waivers that cover nothing: " + ", ".join(f"{waiver.path} ({waiver.gate})" for waiver in idle)


def test_files_near_the_limit_are_announced():
    for finding in long_files(TREE):
        warnings.warn(str(finding), stacklevel=1)
