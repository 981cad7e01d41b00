"""Parsed sources and the questions that the gates ask of them. Standard library only: no torch, no package import."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
NOT_CODE = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})
TRIVIAL = NOT_CODE | {tokenize.ENCODING, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Finding:
    """One violation: where, and what to do about it."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Function:
    """A function with the names that enclose it; `owner` is the class it is a method of."""

    node: FunctionNode
    qualname: str
    owner: ast.ClassDef | None
    nested: bool

    @property
    def is_kernel(self) -> bool:
        """True under `@triton.jit`, `@triton_jit` or `@gluon_jit`, with or without arguments."""
        names = {dotted(item.func if isinstance(item, ast.Call) else item) for item in self.node.decorator_list}
        return bool(names & {"triton.jit", "triton_jit", "gluon_jit"})

    @property
    def arguments(self) -> list[ast.arg]:
        """All parameters but self and cls, keyword-only ones, *args and **kwargs included."""
        spec = self.node.args
        every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        every += [item for item in (spec.vararg, spec.kwarg) if item is not None]
        is_static = any(dotted(item) == "staticmethod" for item in self.node.decorator_list)
        return every[1:] if self.owner is not None and not is_static and every else every


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a chain of attributes, and "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return f"{front}.{node.attr}" if front else ""
    return ""


def docstring_lines(node: ast.AST) -> set[int]:
    """Line numbers of the string statements of a body: docstrings of modules, classes, functions and fields."""
    body = getattr(node, "body", [])
    lines: set[int] = set()
    for item in body if isinstance(body, list) else []:
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str):
            lines.update(range(item.lineno, (item.end_lineno or item.lineno) + 1))
    return lines


class Source:
    """One Python file."""

    def __init__(self, root: Path, path: Path) -> None:
        self.file = path
        self.path = path.relative_to(root).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text, filename=self.path)

    @property
    def module(self) -> str:
        """Dotted module name, of the package for an `__init__.py`."""
        parts = self.path[: -len(".py")].split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def code_lines(self) -> frozenset[int]:
        """Lines that hold code: no blank lines, comments or docstrings."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in TRIVIAL:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | FunctionNode):
                lines -= docstring_lines(node)
        return frozenset(lines)

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """Every function of the file, nested ones too."""
        return tuple(_functions(self.tree, "", None, False))

    @cached_property
    def comments(self) -> dict[int, str]:
        """Line number -> comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    def code_size(self, node: FunctionNode) -> int:
        """Code lines from `def` to the last line of the body."""
        return len(self.code_lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))

    def finding(self, node: ast.AST | int, text: str) -> Finding:
        """Build a finding at a node or a line."""
        return Finding(self.path, node if isinstance(node, int) else getattr(node, "lineno", 1), text)


def _functions(node: ast.AST, prefix: str, owner: ast.ClassDef | None, nested: bool) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            name = f"{prefix}{child.name}"
            yield Function(child, name, owner, nested)
            yield from _functions(child, f"{name}.", None, True)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", child, nested)
        else:
            yield from _functions(child, prefix, owner, nested)


class Tree:
    """The sources of a checkout, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def product(self) -> tuple[Source, ...]:
        """`megatron/`."""
        return self._load("megatron")

    @cached_property
    def core(self) -> tuple[Source, ...]:
        """`megatron/core/`."""
        return tuple(source for source in self.product if source.path.startswith("megatron/core/"))

    @cached_property
    def scripts(self) -> tuple[Source, ...]:
        """Entry points and tools, which may use anything below them."""
        entries = [Source(self.root, path) for path in sorted(self.root.glob("pretrain_*.py"))]
        return (*entries, *self._load("tools"))

    @cached_property
    def tests(self) -> tuple[Source, ...]:
        """`tests/`."""
        return self._load("tests")

    def _load(self, folder: str) -> tuple[Source, ...]:
        paths = sorted((self.root / folder).rglob("*.py"))
        return tuple(Source(self.root, path) for path in paths)
