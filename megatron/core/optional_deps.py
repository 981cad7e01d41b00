"""The only place where an import may fail: packages that some feature uses and that nobody must have.

Ask with `is_available(name)`, use with `require(name)`. A package that is asked for and absent is a
`MissingDependencyError` that names the step which installs it; nothing falls back silently. Nothing is imported before
it is asked for, so importing this module is free.

`triton_jit` and `tl` let a Triton kernel and its plain version share a file: with Triton they are the real things,
without it a kernel can be defined but not launched. `gluon_jit`, `gl` and `hopper` are the same for Gluon, the part of
Triton in which a kernel says itself which warps do what.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from megatron.core.errors import MissingDependencyError

if TYPE_CHECKING:
    triton_jit: Callable[..., Any]
    gluon_jit: Callable[..., Any]

    class _AnyName(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_AnyName):
        """For type checkers: every name is Any, and `tl.constexpr` may annotate."""

        constexpr: TypeAlias = Any

    gl = hopper = tl


@dataclass(frozen=True)
class OptionalPackage:
    """One row of the table: what to import, and what to tell a user who lacks it."""

    module: str
    """The module whose import proves that the package works."""
    remedy: str
    """The step that installs it."""


PACKAGES: dict[str, OptionalPackage] = {
    "apex": OptionalPackage(
        "apex.optimizers", "build it from source against the installed CUDA, or use an NVIDIA PyTorch container"
    ),
    "deep_ep": OptionalPackage(
        "deep_ep",
        "build DeepEP from source against the installed CUDA and NVSHMEM, or use "
        "--moe-flex-dispatcher-backend hybridep --moe-hybridep-engine auto, which needs no package",
    ),
    "gluon": OptionalPackage("triton.experimental.gluon.nvidia.hopper", "pip install 'triton>=3.6'"),
    "helpers_cpp": OptionalPackage(
        "megatron.core.datasets.helpers_cpp", "pip install -e . where a C++ compiler and pybind11 are"
    ),
    "pybind11": OptionalPackage("pybind11", "pip install pybind11"),
    "sentencepiece": OptionalPackage("sentencepiece", "pip install 'megatron-moe[tokenizers]'"),
    "tensorboard": OptionalPackage("torch.utils.tensorboard", "pip install 'megatron-moe[tensorboard]'"),
    "tiktoken": OptionalPackage("tiktoken", "pip install 'megatron-moe[tokenizers]'"),
    "tokenizers": OptionalPackage("tokenizers", "pip install 'megatron-moe[tokenizers]'"),
    "transformer_engine": OptionalPackage(
        "transformer_engine.pytorch",
        "pip install --no-build-isolation 'transformer-engine[pytorch]', use an NVIDIA PyTorch container, or run with "
        "--transformer-impl local",
    ),
    "transformers": OptionalPackage("transformers", "pip install 'megatron-moe[tokenizers]'"),
    "triton": OptionalPackage("triton", "pip install 'megatron-moe[gpu]'"),
    "triton_descriptor": OptionalPackage("triton.tools.tensor_descriptor", "pip install 'triton>=3.4'"),
    "wandb": OptionalPackage("wandb", "pip install 'megatron-moe[wandb]'"),
}


_GLUON = "triton.experimental.gluon"
_GLUON_MODULES = {"gl": f"{_GLUON}.language", "hopper": f"{_GLUON}.language.nvidia.hopper"}


@cache
def _attempt(name: str) -> tuple[ModuleType | None, str]:
    """Import a package of the table once; return the module, or None and the reason."""
    try:
        return importlib.import_module(PACKAGES[name].module), ""
    except (ImportError, OSError, RuntimeError) as error:
        # Compiled packages that do not match the installed torch or driver fail with the latter two.
        return None, f"{type(error).__name__}: {error}"


def is_available(name: str) -> bool:
    """Tell whether an optional package can be imported here."""
    return _attempt(name)[0] is not None


def require(name: str, needed_by: str = "") -> ModuleType:
    """Return the module of an optional package.

    Args:
        name: a key of `PACKAGES`.
        needed_by: the flag or feature that asks, as `field=value`; opens the message.

    Raises:
        MissingDependencyError: the package is absent or does not import; the message names the step that installs it.
    """
    module, reason = _attempt(name)
    if module is None:
        raise MissingDependencyError(_message(name, needed_by, reason))
    return module


def _message(name: str, needed_by: str, reason: str) -> str:
    front = f"{needed_by}: " if needed_by else ""
    return f"{front}the package '{name}' cannot be imported ({reason}); {PACKAGES[name].remedy}."


class _MissingKernel:
    """What `triton_jit` makes of a kernel without Triton: it can be defined and passed on, but not launched."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self) -> NoReturn:
        raise MissingDependencyError(_message("triton", f"kernel '{self.name}'", _attempt("triton")[1]))

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getitem__(self, grid: Any) -> NoReturn:
        self._refuse()


class _MissingLanguage:
    """Stands for `triton.language`: names resolve, as decorators and annotations need, and calls are refused."""

    def __getattr__(self, name: str) -> _MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"tl.{name}")


def _jit_without_triton(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Take the place of `triton.jit`, with and without arguments."""
    if fn is None:
        return _jit_without_triton
    return _MissingKernel(fn.__name__)


def __getattr__(name: str) -> Any:
    """Resolve `triton_jit`, `tl` and Gluon's `gluon_jit`, `gl`, `hopper` on first use (PEP 562)."""
    if name == "triton_jit":
        return require("triton").jit if is_available("triton") else _jit_without_triton
    if name == "tl":
        return importlib.import_module("triton.language") if is_available("triton") else _MissingLanguage()
    if name == "gluon_jit":
        return importlib.import_module(_GLUON).jit if is_available("gluon") else _jit_without_triton
    if name in _GLUON_MODULES:
        return importlib.import_module(_GLUON_MODULES[name]) if is_available("gluon") else _MissingLanguage()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
