"""Layer patterns from the command line: an integer, or a list expression such as `([0]*3+[1]*58)`.

Only lists, integers, `+`, `-` and `*` are understood; nothing is evaluated that could do anything else.
"""

import ast
from typing import Any

MAX_LENGTH = 100_000


def int_or_list(text: str) -> int | list[int]:
    """Parse an integer or a list expression; ValueError says what is wrong with it."""
    if text.strip().lstrip("+-").isdigit():
        return int(text)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{text!r} is neither an integer nor a list expression such as ([0]*3+[1]*58)") from error
    value = _evaluate(tree.body)
    if isinstance(value, list) and not all(isinstance(entry, int) for entry in value):
        raise ValueError(f"{text!r} holds a list inside a list")
    return value


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(entry) for entry in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        return _combine(node.op, _evaluate(node.left), _evaluate(node.right))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed: only integers, lists, + and *")


def _combine(operator: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(operator, ast.Add):
        if type(left) is not type(right):
            raise ValueError("+ needs two lists or two integers")
        value = left + right
    elif isinstance(left, list) and isinstance(right, list):
        raise ValueError("* needs at least one integer")
    else:
        if _length(left) * _length(right) > MAX_LENGTH:
            raise ValueError(f"a list expression longer than {MAX_LENGTH} entries")
        value = left * right
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else abs(value)
