"""The seams that put faults in."""

import types

import pytest

from tests.common.mutants import deleted_call, replaced, scaled_result


class Machine:
    def run(self):
        return 6


@pytest.mark.parametrize("owner", [Machine(), Machine], ids=["instance", "class"])
def test_replacement_ends_with_the_block(owner):
    with replaced(owner, "run", lambda *_: 1):
        assert owner.run() == 1
    assert Machine().run() == 6
    assert "run" not in vars(Machine())


def test_replacement_of_nothing_is_an_error():
    with pytest.raises(AttributeError, match="walk"), replaced(Machine, "walk", None):
        pass


def test_deleted_call_returns_the_given_result_and_counts():
    machine = Machine()
    with deleted_call(machine, "run", result=0) as calls:
        assert machine.run() == 0
    assert calls == [1]


def test_mutant_that_never_runs_fails():
    with pytest.raises(AssertionError, match="run was never called"), deleted_call(Machine(), "run"):
        pass


def test_scaled_result_multiplies():
    module = types.SimpleNamespace(divisor=lambda: 4.0)
    with scaled_result(module, "divisor", 0.5):
        assert module.divisor() == 2.0
    assert module.divisor() == 4.0
