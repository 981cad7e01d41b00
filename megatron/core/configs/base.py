"""The base of every configuration topic: derive values, judge them, report everything at once.

A topic is a dataclass whose fields carry a docstring each. Topics are combined by inheritance into one flat class; the
base walks the inheritance order, so a topic needs to know only its own fields.
"""

import dataclasses
import difflib
import functools
import typing
from typing import Any, Literal, TypeVar

from megatron.core.errors import ConfigError

TopicT = TypeVar("TopicT", bound="ConfigTopic")


@dataclasses.dataclass(frozen=True)
class Violation:
    """One broken rule, ready to be printed as `field=value: constraint; remedy`."""

    fields: tuple[str, ...]
    subject: str
    constraint: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.constraint}; {self.remedy}"


def violation(config: Any, names: str, constraint: str, remedy: str) -> Violation:
    """Build a violation about the space-separated fields `names`, showing the values they have in `config`."""
    fields = tuple(names.split())
    first, *others = (f"{name}={_show(getattr(config, name, None))}" for name in fields)
    subject = f"{first} with {', '.join(others)}" if others else first
    return Violation(fields, subject, constraint, remedy)


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


class ConfigTopic:
    """Derives and checks at construction.

    Subclasses define `derive(self)` and `check(self) -> list[Violation]` for their own fields only. `origins` maps the
    name of a derived field to what it was derived from.
    """

    origins: dict[str, str]

    def __post_init__(self) -> None:
        self.derive_all()
        found = self.violations()
        if found:
            raise ConfigError("\n".join(str(item) for item in found))

    @classmethod
    def draft(cls: type[TopicT], **values: Any) -> TopicT:
        """Build an instance with derived values whose rules have not been judged; `violations()` judges them."""
        config = cls.__new__(cls)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.name in values:
                value = values.pop(field.name)
            elif field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            else:
                value = field.default
            setattr(config, field.name, value)
        if values:
            raise ConfigError(f"{', '.join(sorted(values))}: no such field in {cls.__name__}; remove it.")
        config.derive_all()
        return config

    def derive_all(self) -> None:
        """Fill the values left open, topic by topic, and remember their origins."""
        self.origins = {}
        for topic in reversed(type(self).__mro__):
            if "derive" in topic.__dict__:
                topic.derive(self)  # type: ignore[attr-defined]

    def violations(self) -> list[Violation]:
        """Values that are none of the choices, then every broken rule of every topic, in inheritance order."""
        found = self._wrong_choices()
        for topic in reversed(type(self).__mro__):
            if "check" in topic.__dict__:
                found.extend(topic.check(self))  # type: ignore[attr-defined]
        return found

    def fill(self, name: str, value: Any, origin: str) -> None:
        """Set a field that the user left open, remembering where its value comes from."""
        if getattr(self, name) is None:
            self.replace(name, value, origin)

    def replace(self, name: str, value: Any, origin: str) -> None:
        """Overwrite a field, remembering why."""
        setattr(self, name, value)
        self.origins[name] = origin

    def _wrong_choices(self) -> list[Violation]:
        found = []
        for name, choices in literal_choices(type(self)).items():
            value = getattr(self, name)
            wrong = [entry for entry in (value if isinstance(value, list) else [value]) if entry not in choices]
            if wrong and value is not None:
                known = ", ".join(str(choice) for choice in choices)
                close = difflib.get_close_matches(str(wrong[0]), [str(choice) for choice in choices], n=1)
                hint = f"did you mean {close[0]}" if close else f"choose one of {known}"
                found.append(violation(self, name, f"{wrong[0]!r} is none of {known}", hint))
        return found


@functools.cache
def literal_choices(cls: type) -> dict[str, tuple[Any, ...]]:
    """The fields whose annotation lists the possible values, with these."""
    found = {}
    for name, hint in typing.get_type_hints(cls).items():
        members = [hint, *typing.get_args(hint)]
        members += [inner for member in members for inner in typing.get_args(member)]
        literals = [member for member in members if typing.get_origin(member) is Literal]
        if literals:
            found[name] = typing.get_args(literals[0])
    return found
