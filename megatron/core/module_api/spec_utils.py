"""Module specs: which class to build for a slot of the model, with which arguments, filled with which parts."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any


@dataclass
class ModuleSpec:
    """A module to be built later."""

    module: Any
    """A class or function, or (module path, name) of one that is imported when the module is built."""

    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that the one who builds does not know, such as the mask type."""

    submodules: Any = None
    """Dataclass with the specs of the parts, handed to the constructor as `submodules`."""


def import_module(module_path: tuple[str, str]) -> Any:
    """Return the object named by (module path, name)."""
    path, name = module_path
    return getattr(importlib.import_module(path), name)


def get_module(spec_or_module: ModuleSpec | type | Callable) -> Any:
    """Return the class or function that a spec stands for."""
    module = spec_or_module.module if isinstance(spec_or_module, ModuleSpec) else spec_or_module
    return import_module(module) if isinstance(module, tuple) else module


def build_module(spec_or_module: ModuleSpec | type | Callable, *args: Any, **kwargs: Any) -> Any:
    """Build the module of a spec; a plain function is a finished module and is returned as it is.

    Raises: TypeError with the name of the class in front if the arguments do not fit its constructor.
    """
    module = get_module(spec_or_module)
    if isinstance(module, FunctionType):
        return module
    params: dict[str, Any] = {}
    if isinstance(spec_or_module, ModuleSpec):
        params.update(spec_or_module.params)
        if spec_or_module.submodules is not None:
            params["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **{**params, **kwargs})
    except TypeError as error:
        raise TypeError(f"{getattr(module, '__name__', module)}: {error}") from error
