"""A field's name, annotation and docstring give its flag."""

import dataclasses
from typing import Literal

import pytest

from megatron.core.configs.flag_spec import NO_FLAG, field_docs, flag_specs, knob
from megatron.core.configs.transformer import TransformerConfig


@dataclasses.dataclass
class Example:
    """A topic for this test."""

    some_size: int | None = None
    """How large
    it is."""

    plain_switch: bool = False
    """Turns it on."""

    add_part: bool = knob(True, flag="--no-part --disable-part")
    """Has the part."""

    kind: Literal["a", "b"] = "a"
    """Which one."""

    many: list[float] | None = None
    """Several."""

    hidden: int = knob(3, flag=NO_FLAG)
    """No flag."""

    renamed: int = knob(5, flag="--other", dest="target", arg_default=None)
    """Another name."""


SPECS = {spec.field: spec for spec in flag_specs(Example)}


def test_spelling_type_and_help_follow_from_the_field():
    spec = SPECS["some_size"]
    assert (spec.spellings, spec.dest, spec.type, spec.default) == (("--some-size",), "some_size", int, None)
    assert spec.help == "How large it is."


def test_false_becomes_a_switch_that_turns_on():
    assert (SPECS["plain_switch"].is_switch, SPECS["plain_switch"].const) == (True, True)


def test_true_becomes_a_switch_that_turns_off():
    spec = SPECS["add_part"]
    assert (spec.spellings, spec.const, spec.default) == (("--no-part", "--disable-part"), False, True)


def test_literal_gives_choices():
    assert SPECS["kind"].choices == ("a", "b")


def test_list_takes_several_words():
    assert (SPECS["many"].nargs, SPECS["many"].type) == ("+", float)


def test_hidden_field_has_no_flag():
    assert "hidden" not in SPECS


def test_knob_states_what_differs():
    spec = SPECS["renamed"]
    assert (spec.spellings, spec.dest, spec.field, spec.default) == (("--other",), "target", "renamed", None)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TransformerConfig)])
def test_every_model_field_has_a_docstring(field):
    assert len(field_docs(TransformerConfig)[field]) > 10


def test_mutable_defaults_are_not_shared():
    example = dataclasses.make_dataclass("Holder", [("values", list, knob([1]))])
    first, second = example(), example()
    first.values.append(2)
    assert second.values == [1]
