"""Imports: downwards only, optional packages in one place, the environment in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.unit_tests.architecture import policy
from tests.unit_tests.architecture.source import Finding, Source, Tree, dotted

FACADE = "megatron.core"


@cache
def place(module: str) -> tuple[int, int] | None:
    """Return (layer, unit) of a module, or None where the layers do not speak of it."""
    name = module.removeprefix("megatron.")
    for level, units in enumerate(policy.LAYERS):
        for number, unit in enumerate(units):
            if any(name == item or name.startswith(f"{item}.") for item in unit):
                return level, number
    return None


def type_checking_nodes(tree: ast.AST) -> set[ast.AST]:
    """Every node below `if TYPE_CHECKING:`; its imports are free."""
    free: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and dotted(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for statement in node.body:
                free.update(ast.walk(statement))
    return free


def imports_of(source: Source, modules: frozenset[str]) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield (node, imported module, imported name) for each import within the product, lazy ones too."""
    free = type_checking_nodes(source.tree)
    for node in ast.walk(source.tree):
        if node in free:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("megatron"):
                    yield node, alias.name, ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield (node, below, "") if below in modules else (node, node.module or "", alias.name)


def _layer_fault(importer: str, imported: str) -> str:
    """Return what is wrong with one import, or ""."""
    if imported == FACADE:
        return f"imports through the facade {FACADE}; import from the module that defines the name"
    here, there = place(importer), place(imported)
    if there is None:
        return f"imports {imported}, which has no layer; give it one in policy.LAYERS"
    if here is None:
        return "has no layer; give it one in policy.LAYERS"
    if there[0] > here[0]:
        return f"layer {here[0]} imports {imported} of layer {there[0]}: imports go down only"
    if there[0] == here[0] and there[1] != here[1]:
        return f"imports {imported}, a separate unit of layer {there[0]}; move what both need one layer down"
    return ""


def layers(tree: Tree) -> list[Finding]:
    """Imports go down, never across units of a layer, never in a cycle."""
    modules = frozenset(source.module for source in tree.product)
    found, graph = [], {module: set() for module in modules}
    for source in tree.product:
        for node, imported, _ in imports_of(source, modules):
            graph[source.module].add(imported)
            fault = _layer_fault(source.module, imported) if source.module != FACADE else ""
            if fault:
                found.append(source.finding(node, fault))
    found += [
        Finding(cycle[0].replace(".", "/"), 1, "import cycle: " + " -> ".join((*cycle, cycle[0])))
        for cycle in cycles(graph)
        if frozenset(cycle) not in policy.TWINS
    ]
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, each sorted (Tarjan, iterative)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result = []
    for start in sorted(graph):
        if start in order:
            continue
        work = [(start, iter(sorted(graph[start])))]
        order[start] = low[start] = len(order)
        stack.append(start)
        while work:
            node, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    part = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    result += [sorted(part)] if len(part) > 1 else []
            elif target in graph and target not in order:
                order[target] = low[target] = len(order)
                stack.append(target)
                work.append((target, iter(sorted(graph[target]))))
            elif target in stack:
                low[node] = min(low[node], order[target])
    return result


def optional_imports(tree: Tree) -> list[Finding]:
    """An import that may fail stands in `optional_deps` alone."""
    found = []
    for source in (*tree.product, *tree.scripts):
        if source.module == policy.OPTIONAL_IMPORTS:
            continue
        for node in ast.walk(source.tree):
            inside = [item for item in ast.walk(node) if isinstance(node, ast.Try) and _is_import(item)]
            found += [source.finding(item, "import inside try; ask core.optional_deps") for item in inside]
            if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "find_spec":
                found.append(source.finding(node, "find_spec; ask core.optional_deps"))
    return found


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"import_module", "__import__"}
    )


def environment(tree: Tree) -> list[Finding]:
    """Environment variables are read in `core/env` alone."""
    return [
        source.finding(node, f"{dotted(node)}; add a typed entry to core/env.py and read that")
        for source in (*tree.product, *tree.scripts)
        if source.module != policy.ENVIRONMENT
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and dotted(node) in {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    ]
