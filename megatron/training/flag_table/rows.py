"""Rows of the flag table: flags that parse though nothing here acts on them, and values that are not there.

A feature owns its flags, so that its status is stated once. `not_yet`: refused by name as soon as a value differs from
the inert default (always, if `strict`). `refused`: the same, for good. `no_effect`: accepted with one start-up line.
A feature that arrives turns its rows into fields of a configuration topic.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from megatron.core.configs.flag_spec import FlagSpec

Status = Literal["not_yet", "refused", "no_effect"]


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature with the flags that belong to it; `note` says what to do, or why nothing has to be done."""

    name: str
    status: Status
    note: str
    flags: tuple[FlagSpec, ...]
    strict: bool = False


@dataclasses.dataclass(frozen=True)
class ValueRow:
    """Known values of an acting flag that are not accepted here."""

    dest: str
    values: tuple[str, ...]
    status: Literal["not_yet", "refused"]
    feature: str
    remedy: str


def not_yet(name: str, note: str, *flags: FlagSpec, strict: bool = False) -> Feature:
    """A feature that is missing so far."""
    return Feature(name, "not_yet", note, flags, strict)


def refused(name: str, note: str, *flags: FlagSpec, strict: bool = False) -> Feature:
    """A feature that this tree leaves out."""
    return Feature(name, "refused", note, flags, strict)


def no_effect(name: str, note: str, *flags: FlagSpec) -> Feature:
    """Flags that are accepted and change nothing."""
    return Feature(name, "no_effect", note, flags)


def switch(spellings: str, default: bool | None = False, dest: str = "") -> FlagSpec:
    """A flag without a value that turns something on."""
    return _spec(spellings, dest, default, None, None, 0, True)


def negative(spellings: str, dest: str) -> FlagSpec:
    """A flag without a value that turns off what is on by default."""
    return _spec(spellings, dest, True, None, None, 0, False)


def value(
    spellings: str,
    kind: Callable[[str], Any],
    default: Any = None,
    choices: str | tuple[Any, ...] | None = None,
    dest: str = "",
) -> FlagSpec:
    """A flag with one value; `choices` may be written with bars between them."""
    listed = tuple(choices.split("|")) if isinstance(choices, str) else choices
    return _spec(spellings, dest, default, kind, listed, None, None)


def words(
    spellings: str, kind: Callable[[str], Any], default: Any = None, choices: str | None = None, dest: str = ""
) -> FlagSpec:
    """A flag with one value or more."""
    return _spec(spellings, dest, default, kind, tuple(choices.split("|")) if choices else None, "+", None)


def _spec(spellings: str, dest: str, default: Any, kind: Any, choices: Any, nargs: Any, const: Any) -> FlagSpec:
    names = tuple(spellings.split())
    target = dest or names[0].removeprefix("--").replace("-", "_")
    return FlagSpec(names, target, "", default, kind, choices, nargs, const, "")
