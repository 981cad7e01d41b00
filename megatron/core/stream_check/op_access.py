"""Which arguments an operator reads and which it writes, from its schema.

Operators that make a view touch no data, and those that only copy a shape do not read what they are given.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

SHAPE_ONLY = frozenset(
    {
        "empty_like",
        "full_like",
        "is_same_size",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randn_like",
        "zeros_like",
    }
)
OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
"""In-place operators that do not read what they overwrite."""


@dataclass(frozen=True)
class Access:
    """The tensor arguments of an operator."""

    name: str
    reads: tuple[int, ...]
    """positions of arguments that are read only"""
    writes: tuple[int, ...]
    """positions of arguments that are written"""
    written_keywords: frozenset[str]
    """arguments by keyword that are written, such as out="""
    is_view: bool
    """True if no data is touched"""


@functools.cache
def access_of(operator: Any) -> Access:
    """The accesses of an operator overload."""
    schema = operator._schema
    reads, writes, keywords = [], [], set()
    for i, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(i)
            keywords.add(argument.name)
        else:
            reads.append(i)
    packet = operator.overloadpacket.__name__
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    is_view = bool(aliases) and not writes
    if packet in SHAPE_ONLY:
        reads = []
    return Access(f"{operator.namespace}.{packet}", tuple(reads), tuple(writes), frozenset(keywords), is_view)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument: itself, or those of a list, lists of lists included."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
