"""Documents: shapes where tensors move, a README in each package, and no path that leads nowhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.unit_tests.architecture import policy
from tests.unit_tests.architecture.gates_names import within
from tests.unit_tests.architecture.source import Finding, Function, Source, Tree

SHAPE = re.compile(r"\[[^\[\]]*\]|\bscalar\b|\bany shape\b")
IN_BACKTICKS = re.compile(r"`([^`\s]+)`|\]\(([^)\s#]+)(?:#[^)]*)?\)")
# A bare name such as `metadata.json` is a file that a run writes; a path, and the name of a source, are ours.
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/|[\w.-]+(?:/[\w.-]+)+\.(?:txt|toml|yaml|json)|[\w./-]+\.(?:py|md|sh|cpp)")
SKIPPED = frozenset({".venv", ".git", "node_modules", "build", "dist", "runs"})


def _takes_tensors(function: Function) -> bool:
    annotations = (item.annotation for item in function.arguments if item.annotation is not None)
    return any("Tensor" in ast.unparse(item) for item in annotations)


def _is_public(function: Function) -> bool:
    return not function.nested and not any(part.startswith("_") for part in function.qualname.split("."))


def _described(source: Source, function: Function) -> str:
    """Return what may state the shapes: the docstring, comments in the signature and the docstring of the class."""
    node = function.node
    signature = range(node.lineno, node.body[0].lineno)
    comments = (text for line, text in source.comments.items() if line in signature)
    owner = ast.get_docstring(function.owner) if function.owner else ""
    return " ".join([ast.get_docstring(node) or "", owner or "", *comments])


def shapes(tree: Tree) -> list[Finding]:
    """A public function with tensor arguments states a shape in brackets."""
    return [
        source.finding(function.node, f"{function.qualname}: state the shapes of its tensors, as in [s, b, h]")
        for source in tree.core
        if within(source.module, policy.SHAPE_PACKAGES)
        for function in source.functions
        if _is_public(function) and _takes_tensors(function) and not SHAPE.search(_described(source, function))
    ]


def packages(tree: Tree) -> Iterator[Path]:
    """Yield each folder that is a package of its own: those right below core, and training; moe is as large as one."""
    core = tree.root / "megatron" / "core"
    yield core
    yield tree.root / "megatron" / "training"
    yield core / "transformer" / "moe"
    yield from sorted(path for path in core.iterdir() if path.is_dir() and any(path.rglob("*.py")))


def readmes(tree: Tree) -> list[Finding]:
    """Each package has a README of at most 120 lines."""
    found = []
    for package in packages(tree):
        readme = package / "README.md"
        name = readme.relative_to(tree.root).as_posix()
        if package.is_dir() and not readme.is_file():
            found.append(Finding(name, 1, "missing; purpose, file map, legend, how to add one, where the tests are"))
        elif package.is_dir():
            lines = len(readme.read_text(encoding="utf-8").splitlines())
            if lines > policy.README_LINES:
                found.append(Finding(name, 1, f"{lines} lines, at most {policy.README_LINES}"))
    return found


def documents(tree: Tree) -> Iterator[Path]:
    """Yield the Markdown files of the checkout."""
    for path in sorted(tree.root.rglob("*.md")):
        if not SKIPPED & set(path.relative_to(tree.root).parts) and path.name != "CHANGELOG.md":
            yield path


def paths(tree: Tree) -> list[Finding]:
    """Each path that a document names in backticks or links to exists."""
    found = []
    for document in documents(tree):
        name = document.relative_to(tree.root).as_posix()
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            for match in IN_BACKTICKS.finditer(line):
                text = match.group(1) or match.group(2)
                if PATH.fullmatch(text) and not _exists(tree.root, document.parent, text):
                    found.append(Finding(name, number, f"{text} does not exist"))
    return found


def _exists(root: Path, folder: Path, text: str) -> bool:
    """Look beside the document, at the root, and in the two places that import paths start from."""
    starts = (folder, root, root / "megatron", root / "megatron" / "core")
    return any((start / text).exists() for start in starts)
