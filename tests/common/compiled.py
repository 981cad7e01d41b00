"""Triton needs no GPU to build code for one: kernels that the interpreter accepts must also compile."""

from typing import Any

import pytest


def compiled_for_hopper(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> str:
    """Build a kernel as it is launched on an H200 and return its PTX.

    Args:
        constants: Values of the compile-time arguments; None for an operand that a launch does without.
        types: Triton's types of other arguments. What is not in it is a number if it is named like a size or a stride,
            else a pointer to bf16. Integers and pointers count as multiples of 16, as they are at the shapes of models.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    numbers = [name for name in names if name.startswith("num_") or name.endswith(("width", "stride"))]
    signature = {name: types.get(name, "i32" if name in numbers else "*bf16") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32")
    }
    built = triton.compile(ASTSource(kernel, signature, constexprs, aligned), target=GPUTarget("cuda", 90, 32))
    assert ".target sm_90" in built.asm["ptx"]
    return built.asm["ptx"]
