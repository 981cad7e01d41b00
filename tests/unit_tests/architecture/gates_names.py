"""Names and words: registries own their choices, every knob does something, output and errors go one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.unit_tests.architecture import policy
from tests.unit_tests.architecture.source import Finding, Source, Tree, dotted

ANY_TODO = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
GETTERS = frozenset({"getattr", "attrgetter", "operator.attrgetter"})
GOOD_TODO = re.compile(r"TODO\([^)]+\): \S")


def within(module: str, places: tuple[str, ...]) -> bool:
    """Tell whether a module is one of the places or lies below one."""
    return any(module == place or module.startswith(f"{place}.") for place in places)


def _compared_strings(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings that a comparison or a match statement decides by."""
    sides: list[ast.AST] = []
    if isinstance(node, ast.Compare) and any(
        isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops
    ):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
        sides = [node.value]
    for side in sides:
        items = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
        yield from (item for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str))


def choices(tree: Tree) -> list[Finding]:
    """The name of a dispatcher, engine or recipe decides nothing outside its registry."""
    found = []
    for source in tree.core:
        for node in ast.walk(source.tree):
            for constant in _compared_strings(node):
                for names, owners in policy.CHOICES:
                    if constant.value in names and not within(source.module, owners):
                        text = f"compares with {constant.value!r}; ask the registry's entry for a trait instead"
                        found.append(source.finding(constant, text))
    return found


def config_classes(tree: Tree) -> Iterator[tuple[Source, ast.ClassDef]]:
    """Yield every configuration dataclass."""
    for source in tree.product:
        if within(source.module, policy.CONFIG_PACKAGES + policy.CONFIG_MODULES):
            for node in source.tree.body:
                decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
                names = {dotted(item.func if isinstance(item, ast.Call) else item) for item in decorators}
                if names & {"dataclass", "dataclasses.dataclass"}:
                    yield source, node


def config_fields(tree: Tree) -> Iterator[tuple[Source, ast.AnnAssign, set[str]]]:
    """Yield (source, node, names) for the fields that a user can set, which are those with a docstring.

    The names are the field's own and, where the command line uses another, the `dest` of its flag.
    """
    for source, node in config_classes(tree):
        described = {
            before.target.id
            for before, after in zip(node.body, node.body[1:], strict=False)
            if isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        }
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id in described:
                keywords = item.value.keywords if isinstance(item.value, ast.Call) else []
                others = [word.value for word in keywords if word.arg == "dest"]
                yield source, item, {item.target.id, *(str(o.value) for o in others if isinstance(o, ast.Constant))}


def names_read(tree: Tree) -> set[str]:
    """Every attribute that code outside of configuration and argument handling reads, by name."""
    judges = policy.CONFIG_PACKAGES + policy.CONFIG_MODULES + policy.ARGUMENT_MODULES
    read: set[str] = set()
    for source in (*tree.product, *tree.scripts):
        if within(source.module, judges):
            continue
        getters = GETTERS | {function.node.name for function in source.functions if _passes_on_a_name(function.node)}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Call) and dotted(node.func) in getters:
                read.update(item.value for item in node.args if isinstance(item, ast.Constant))
    return read


def _passes_on_a_name(node: ast.AST) -> bool:
    """Tell whether a function hands a name that it was given to `getattr`."""
    calls = (item for item in ast.walk(node) if isinstance(item, ast.Call) and dotted(item.func) == "getattr")
    return any(len(call.args) > 1 and isinstance(call.args[1], ast.Name) for call in calls)


def derived_inputs(tree: Tree) -> set[str]:
    """Fields that configuration code turns into other fields: their effect is the derived field's."""
    read: set[str] = set()
    for source in tree.product:
        if within(source.module, policy.CONFIG_PACKAGES + policy.CONFIG_MODULES + policy.ARGUMENT_MODULES):
            for function in source.functions:
                if function.node.name in policy.DERIVING_FUNCTIONS:
                    nodes = (node for node in ast.walk(function.node) if isinstance(node, ast.Attribute))
                    read.update(node.attr for node in nodes if isinstance(node.ctx, ast.Load))
    return read


def dead_knobs(tree: Tree) -> list[Finding]:
    """Every field of a configuration dataclass is read by code that acts on it."""
    read = names_read(tree) | derived_inputs(tree)
    return [
        source.finding(
            node, f"{ast.unparse(node.target)} is read by nothing; use it, or make it a row of the flag table"
        )
        for source, node, names in config_fields(tree)
        if not names & read
    ]


def output_and_excepts(tree: Tree) -> list[Finding]:
    """No `print`, no handler that catches everything without raising again."""
    found = []
    for source in tree.product:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and dotted(node.func) == "print":
                found.append(source.finding(node, "print; use core/utils/logging"))
            elif isinstance(node, ast.ExceptHandler) and _is_blind(node):
                found.append(source.finding(node, "catches everything; name the exceptions or raise again"))
    return found


def _is_blind(node: ast.ExceptHandler) -> bool:
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    catches_all = any(kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in kinds)
    raises = any(isinstance(item, ast.Raise) and item.exc is None for item in ast.walk(node))
    return catches_all and not raises


def words(tree: Tree) -> list[Finding]:
    """ASCII only; a TODO names the condition that ends it."""
    found = []
    for source in (*tree.product, *tree.scripts, *tree.tests):
        for number, line in enumerate(source.text.splitlines(), 1):
            if not line.isascii():
                found.append(source.finding(number, "not ASCII; spell it out, or escape it"))
        for number, comment in source.comments.items():
            if ANY_TODO.search(comment) and not GOOD_TODO.search(comment):
                found.append(source.finding(number, "TODO without an end; write TODO(condition): what to do"))
    return found
