"""Names that a parameter has in the unsharded model, whatever part of it this rank holds.

A container whose local numbering differs from the global one (layers of a pipeline stage, experts of a rank), or a
wrapper that adds a level of its own, defines

    def global_name(self, local_name: str) -> str

`local_name` is the dotted path below that module, in which deeper modules have already renamed their part.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T", bound=torch.Tensor)


def named_global_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (global name, parameter) below `module`; a parameter that is shared appears once, by its first name."""
    seen: set[int] = set()
    for name, param in _walk(module, lambda owner: owner.named_parameters(recurse=False)):
        if id(param) not in seen:
            seen.add(id(param))
            yield name, param


def named_global_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (global name, buffer) of the persistent buffers below `module`."""
    return _walk(module, _persistent_buffers)


def _persistent_buffers(owner: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    names = set(owner.state_dict(keep_vars=True))
    return ((name, buffer) for name, buffer in owner.named_buffers(recurse=False) if name in names)


def _walk(
    module: torch.nn.Module, own_of: Callable[[torch.nn.Module], Iterator[tuple[str, T]]]
) -> Iterator[tuple[str, T]]:
    rename = getattr(module, "global_name", None)
    below = (
        (f"{child_name}.{name}", tensor)
        for child_name, child in module.named_children()
        for name, tensor in _walk(child, own_of)
    )
    for source in (own_of(module), below):
        for name, tensor in source:
            yield (rename(name) if rename is not None else name), tensor
