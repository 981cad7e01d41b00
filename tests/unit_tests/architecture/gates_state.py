"""State: who may hold process-wide objects, and who may mark or resize the memory of a tensor."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit_tests.architecture import policy
from tests.unit_tests.architecture.source import Finding, Function, Source, Tree, dotted

MUTABLE_LITERALS = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
MUTABLE_CALLS = frozenset(
    {"list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter", "WeakSet"}
    | {"WeakKeyDictionary", "WeakValueDictionary"}
)
# What is left of a tensor after these is a number, a size or a description.
DESCRIPTIONS = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout"})
DESCRIBING_CALLS = frozenset(
    {"size", "numel", "dim", "stride", "item", "tolist", "is_contiguous", "len", "int", "bool"}
)


def global_statements(tree: Tree) -> list[Finding]:
    """`global` only in the allowed modules: one name each, and a `reset()` that clears it."""
    found = []
    for source in tree.product:
        nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Global)]
        names = sorted({name for node in nodes for name in node.names})
        if not nodes:
            continue
        if source.module not in policy.GLOBAL_MODULES:
            found += [source.finding(node, f"global {', '.join(node.names)}; pass the object on") for node in nodes]
            continue
        if len(names) > 1:
            found.append(source.finding(nodes[0], f"global {', '.join(names)}: one object per module"))
        if "reset" not in {function.node.name for function in source.functions}:
            found.append(source.finding(nodes[0], f"global {names[0]} without a reset() that clears it"))
    return found


def class_attributes(tree: Tree) -> list[Finding]:
    """No class attribute that all instances could change."""
    found = []
    for source in tree.product:
        for node in ast.walk(source.tree):
            for item in node.body if isinstance(node, ast.ClassDef) else []:
                value = item.value if isinstance(item, ast.Assign | ast.AnnAssign) else None
                if _is_mutable(value):
                    text = f"{node.name}: mutable class attribute; set it in __init__, or use a tuple or frozenset"
                    found.append(source.finding(item, text))
    return found


def _is_mutable(value: ast.AST | None) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).split(".")[-1] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_LITERALS)


def lifetimes(tree: Tree) -> list[Finding]:
    """`record_stream` and storage resizing in `core/streams` alone; Functions keep tensors by save_for_backward."""
    found = []
    for source in tree.product:
        if source.module != policy.LIFETIMES:
            found += [source.finding(node, text) for node, text in _memory_calls(source.tree)]
        for function in source.functions:
            bases = {dotted(base).split(".")[-1] for base in (function.owner.bases if function.owner else ())}
            if "Function" in bases and function.node.name in {"forward", "setup_context"}:
                found += list(_kept_tensors(source, function))
    return found


def _memory_calls(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "record_stream":
            yield node, "record_stream; hand the tensor over through core/streams"
        elif node.func.attr == "resize_" and "storage" in ast.unparse(node.func.value).lower():
            yield node, "resizes a storage; release it through core/streams"


def _kept_tensors(source: Source, function: Function) -> Iterator[Finding]:
    """Find `ctx.name = <tensor>` in a Function's forward, following simple assignments from its tensor arguments."""
    spec = function.node.args
    names = [*spec.posonlyargs, *spec.args]
    context = names[0].arg if names else "ctx"
    tensors = {
        item.arg
        for item in [*names[1:], *spec.kwonlyargs]
        if item.annotation is not None and "Tensor" in ast.unparse(item.annotation)
    }
    for node in sorted(ast.walk(function.node), key=lambda item: getattr(item, "lineno", 0)):
        if not isinstance(node, ast.Assign) or not holds_tensor(node.value, tensors):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                tensors.add(target.id)
            elif isinstance(target, ast.Attribute) and dotted(target.value) == context:
                text = f"{function.qualname}: {dotted(target)} keeps a tensor; use save_for_backward"
                yield source.finding(node, text)


def holds_tensor(value: ast.AST, tensors: set[str]) -> bool:
    """Guess whether an expression still holds one of the named tensors, and not only a description of it."""
    if isinstance(value, ast.Name):
        return value.id in tensors
    if isinstance(value, ast.Attribute):
        return value.attr not in DESCRIPTIONS and holds_tensor(value.value, tensors)
    if isinstance(value, ast.Compare):
        return False
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else dotted(value.func)
        if name in DESCRIBING_CALLS:
            return False
    return any(holds_tensor(child, tensors) for child in ast.iter_child_nodes(value))
