"""Sizes: a file that is read once from top to bottom, functions that fit on a screen."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.unit_tests.architecture import policy
from tests.unit_tests.architecture.source import Finding, Function, Source, Tree, dotted

BRANCHES = ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.IfExp | ast.match_case


def every_source(tree: Tree) -> Iterable[Source]:
    """The product, its scripts and its tests."""
    return (*tree.product, *tree.scripts, *tree.tests)


def files(tree: Tree) -> list[Finding]:
    """A file has at most 400 code lines."""
    return [
        source.finding(1, f"{len(source.code_lines)} code lines, at most {policy.FILE_LINES}; split it by subject")
        for source in every_source(tree)
        if len(source.code_lines) > policy.FILE_LINES
    ]


def long_files(tree: Tree) -> list[Finding]:
    """Files that come near the limit: a warning, not a failure."""
    return [
        source.finding(1, f"{len(source.code_lines)} code lines; the limit is {policy.FILE_LINES}")
        for source in every_source(tree)
        if policy.FILE_LINES_WARNING < len(source.code_lines) <= policy.FILE_LINES
    ]


def functions(tree: Tree) -> list[Finding]:
    """A function has at most 60 code lines, nested functions included; a Triton kernel 120."""
    found = []
    for source in every_source(tree):
        for function in source.functions:
            size = source.code_size(function.node)
            limit = policy.KERNEL_LINES if function.is_kernel else policy.FUNCTION_LINES
            if size > limit:
                found.append(source.finding(function.node, f"{function.qualname}: {size} code lines, at most {limit}"))
    return found


def complexity_of(node: ast.AST) -> int:
    """1 + each branch, loop, handler, ternary, case, comprehension condition and extra `and`/`or`."""
    total = 1
    for child in ast.walk(node):
        if isinstance(child, BRANCHES):
            total += 1
        elif isinstance(child, ast.comprehension):
            total += len(child.ifs)
        elif isinstance(child, ast.BoolOp):
            total += len(child.values) - 1
    return total


def complexity(tree: Tree) -> list[Finding]:
    """A function has a complexity of at most 15."""
    found = []
    for source in every_source(tree):
        for function in source.functions:
            value = complexity_of(function.node)
            if value > policy.COMPLEXITY and not function.is_kernel:
                text = f"{function.qualname}: complexity {value}, at most {policy.COMPLEXITY}; cut it into steps"
                found.append(source.finding(function.node, text))
    return found


def _signature_is_given(function: Function) -> bool:
    """True if torch or Megatron-LM's users fix the signature."""
    if function.is_kernel or function.qualname in policy.UPSTREAM_SIGNATURES:
        return True
    bases = {dotted(base).rsplit(".", 1)[-1] for base in (function.owner.bases if function.owner else ())}
    return "Function" in bases and function.node.name in policy.TORCH_CALLED


def _oversized_signatures(sources: Iterable[Source]) -> Iterator[tuple[Source, Function]]:
    for source in sources:
        for function in source.functions:
            if len(function.arguments) > policy.PARAMETERS and not _signature_is_given(function):
                yield source, function


def parameters(tree: Tree) -> list[Finding]:
    """A function has at most 8 parameters, keyword-only ones too; dataclass fields are free."""
    return [
        source.finding(
            function.node,
            f"{function.qualname}: {len(function.arguments)} parameters, at most {policy.PARAMETERS}; "
            "group them in a dataclass",
        )
        for source, function in _oversized_signatures(every_source(tree))
    ]
