"""Layer patterns from the command line, without evaluating code."""

import pytest

from megatron.core.configs.list_expression import int_or_list


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("[0,1]", [0, 1]),
        ("([0]*3+[1]*5)", [0, 0, 0, 1, 1, 1, 1, 1]),
        ("[0] + [1] * 2", [0, 1, 1]),
        ("2*[1,0]", [1, 0, 1, 0]),
        ("([1]*(1+1))", [1, 1]),
    ],
)
def test_expression_gives_its_list(text, value):
    assert int_or_list(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('true')", "open('x')", "[x for x in (1,)]", "abc", "[1", "True", "1.5", ""),
        *("[[1]]", "[1]*[1]", "[1]+1", "[1]*10**9", "[0]*1000000"),
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"allowed|neither|inside|needs|longer"):
        int_or_list(text)
