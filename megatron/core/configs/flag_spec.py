"""From a dataclass field to the description of a command-line flag.

Spelling, type, choices and repetition follow from the field's name and annotation, the help text from its docstring.
`knob` states only what cannot be derived: another spelling, another destination, no flag at all.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable
from typing import Any

NO_FLAG = "none"


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """A flag as the argument parser needs it; `field` is the dataclass field that it fills."""

    spellings: tuple[str, ...]
    dest: str
    field: str
    default: Any
    type: Callable[[str], Any] | None
    choices: tuple[Any, ...] | None
    nargs: int | str | None
    const: Any
    help: str

    @property
    def is_switch(self) -> bool:
        """True for a flag without a value."""
        return self.nargs == 0


def knob(
    default: Any = None,
    *,
    flag: str | None = None,
    dest: str | None = None,
    arg_default: Any = dataclasses.MISSING,
    parse: Callable[[str], Any] | None = None,
    nargs: int | str | None = None,
) -> Any:
    """A dataclass field whose flag differs from what its name says.

    `flag` holds the spellings separated by spaces, or NO_FLAG; `arg_default` is the command line's default where it is
    not the field's. A mutable default is copied for each instance.
    """
    metadata = {"flag": flag, "dest": dest, "arg_default": arg_default, "parse": parse, "nargs": nargs}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring of each field, inherited ones included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = typing.cast(ast.ClassDef, tree.body[0]).body
        for node, following in itertools.pairwise(body):
            is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            if is_field and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[node.target.id] = inspect.cleandoc(str(following.value.value))  # type: ignore[union-attr]
    return docs


@functools.cache
def flag_specs(cls: type) -> tuple[FlagSpec, ...]:
    """The flags of one dataclass, in field order."""
    hints = typing.get_type_hints(cls)
    docs = field_docs(cls)
    fields = dataclasses.fields(cls)
    return tuple(
        _spec(field, hints[field.name], docs.get(field.name, ""))
        for field in fields
        if field.metadata.get("flag") != NO_FLAG
    )


def _spec(field: dataclasses.Field, hint: Any, doc: str) -> FlagSpec:
    meta = field.metadata
    spellings = tuple((meta.get("flag") or "--" + field.name.replace("_", "-")).split())
    default = meta.get("arg_default", dataclasses.MISSING)
    if default is dataclasses.MISSING:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    kind, choices, nargs = _shape(hint)
    if meta.get("parse"):
        kind, nargs = meta["parse"], meta["nargs"]
    const = None
    if kind is bool:
        kind, nargs, const = None, 0, default is not True
    return FlagSpec(
        spellings=spellings,
        dest=meta.get("dest") or field.name,
        field=field.name,
        default=default,
        type=kind,
        choices=choices,
        nargs=nargs,
        const=const,
        help=" ".join(doc.split()),
    )


def _shape(hint: Any) -> tuple[Any, tuple[Any, ...] | None, str | None]:
    """Take an annotation apart: (type of one word, its choices, repetition)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in arguments if member is not type(None)]
        listed = [member for member in members if typing.get_origin(member) is list]
        return _shape((listed or members)[0])
    if origin is typing.Literal:
        return type(arguments[0]), arguments, None
    if origin is list:
        kind, choices, _ = _shape(arguments[0])
        return kind, choices, "+"
    return hint, None, None
