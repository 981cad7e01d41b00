"""Kernels built for a Hopper GPU where there is none: what the interpreter accepts must also compile."""

from collections.abc import Mapping
from typing import Any

import pytest


def ptx(kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str]) -> str:
    """The code of a Triton kernel with these constexpr arguments; other arguments have `types`, by default i32."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    built = triton.compile(ASTSource(kernel, signature, constexprs), target=GPUTarget("cuda", 90, 32))
    return built.asm["ptx"]
