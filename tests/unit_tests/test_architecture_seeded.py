"""Each gate fails on a violation planted in a small checkout, and is silent about the same checkout without it."""

from __future__ import annotations

import pytest

from tests.unit_tests.architecture import gates_imports, gates_size, policy
from tests.unit_tests.architecture.gates import GATES, Waiver, read_waivers, unused, unwaived
from tests.unit_tests.architecture.source import Tree

CLEAN = {
    "megatron/core/__init__.py": '"""Facade."""\n',
    "megatron/core/README.md": "See `configs/moe.py` and `errors.py`.\n",
    "megatron/core/errors.py": '"""Errors."""\n\n\nclass ConfigError(ValueError):\n    """A wrong setting."""\n',
    "megatron/core/configs/README.md": "Topics.\n",
    "megatron/core/configs/moe.py": (
        '"""Topic."""\nimport dataclasses\n\n\n@dataclasses.dataclass\nclass MoEConfig:\n    """MoE."""\n\n'
        '    top_k: int = 2\n    """Experts per token."""\n'
    ),
    "megatron/core/transformer/README.md": "Layers.\n",
    "megatron/core/transformer/moe/README.md": "Experts.\n",
    "megatron/core/transformer/moe/router.py": (
        '"""Router."""\nfrom megatron.core.configs.moe import MoEConfig\n\n\n'
        'def route(config: MoEConfig, x: "Tensor"):\n'
        '    """Choose experts: [T, h] -> [T, k]."""\n    return config.top_k, x\n'
    ),
    "megatron/training/README.md": "Loop.\n",
    "megatron/training/training.py": '"""Loop."""\nfrom megatron.core import errors\n\nError = errors.ConfigError\n',
}
LONG_FILE = "x = 1\n" * (policy.FILE_LINES + 1)
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * policy.FUNCTION_LINES
LONG_KERNEL = "@triton_jit\ndef f():\n" + "    x = 1\n" * policy.KERNEL_LINES
FORK = "def f(a):\n" + "    if a and a:\n        a = 1\n" * 8
WIDE = "def f(a, b, c, d, *, e, f, g, h, i):\n    pass\n"
KEPT = "class F(torch.autograd.Function):\n    def forward(ctx, x: Tensor):\n        y = x * 2\n        ctx.y = y\n"
TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron.core.transformer.moe import router\n"

KNOB = (
    '@dataclass(kw_only=True)\nclass More:\n    """M."""\n    unread_knob: int = knob(1, dest="n_knobs")\n'
    '    """Does nothing."""\n'
)

# (gate, file, text, part of the message)
VIOLATIONS = [
    ("file", "megatron/core/utils.py", LONG_FILE, "401 code lines, at most 400"),
    ("file", "tools/long.py", LONG_FILE, "401 code lines"),
    ("file", "tests/test_long.py", LONG_FILE, "401 code lines"),
    ("function", "megatron/core/utils.py", LONG_FUNCTION, "f: 61 code lines, at most 60"),
    ("function", "megatron/core/utils.py", LONG_KERNEL, "f: 121 code lines, at most 120"),
    ("complexity", "megatron/core/utils.py", FORK, "f: complexity 17, at most 15"),
    ("parameters", "megatron/core/utils.py", WIDE, "f: 9 parameters, at most 8"),
    (
        "layers",
        "megatron/core/utils.py",
        "import megatron.core.configs.moe\n",
        "layer 0 imports megatron.core.configs.moe",
    ),
    (
        "layers",
        "megatron/core/utils.py",
        "def f():\n    from megatron.core.configs import moe\n",
        "imports go down only",
    ),
    ("layers", "megatron/core/fusions/f.py", "from megatron.core.configs import moe\n", "a separate unit of layer 1"),
    ("layers", "megatron/training/a.py", "from megatron.core import ModelParallelConfig\n", "through the facade"),
    ("layers", "megatron/core/novel.py", "from megatron.core import errors\n", "has no layer"),
    ("global", "megatron/core/utils.py", "def f():\n    global X\n    X = 1\n", "global X; pass the object on"),
    ("global", "megatron/core/parallel_state.py", "def f():\n    global X\n    X = 1\n", "without a reset()"),
    (
        "global",
        "megatron/core/parallel_state.py",
        "def reset():\n    global X, Y\n    X = Y = 1\n",
        "global X, Y: one object per module",
    ),
    ("class attributes", "megatron/core/utils.py", "class A:\n    seen: dict = {}\n", "A: mutable class attribute"),
    ("class attributes", "megatron/core/utils.py", "class A:\n    seen = defaultdict(list)\n", "A: mutable class"),
    ("optional imports", "megatron/core/utils.py", "try:\n    import apex\nfinally:\n    pass\n", "import inside try"),
    ("optional imports", "megatron/core/utils.py", "x = importlib.util.find_spec('apex')\n", "find_spec"),
    (
        "optional imports",
        "tools/t.py",
        "try:\n    x = importlib.import_module('apex')\nfinally:\n    pass\n",
        "inside try",
    ),
    ("environment", "megatron/core/utils.py", "import os\nx = os.environ['A']\n", "os.environ; add a typed entry"),
    ("environment", "pretrain_gpt.py", "import os\nx = os.getenv('A')\n", "os.getenv"),
    ("names of choices", "megatron/core/utils.py", "x = name == 'alltoall'\n", "compares with 'alltoall'"),
    ("names of choices", "megatron/core/utils.py", "x = name in ('a', 'hybridep')\n", "compares with 'hybridep'"),
    (
        "names of choices",
        "megatron/core/utils.py",
        "match name:\n    case 'blockwise':\n        pass\n",
        "compares with 'blockwise'",
    ),
    ("lifetimes", "megatron/core/utils.py", "x.record_stream(s)\n", "record_stream"),
    ("lifetimes", "megatron/core/utils.py", "x.untyped_storage().resize_(0)\n", "resizes a storage"),
    ("lifetimes", "megatron/core/utils.py", KEPT, "F.forward: ctx.y keeps a tensor"),
    (
        "dead knobs",
        "megatron/core/configs/more.py",
        KNOB,
        "unread_knob is read by nothing",
    ),
    ("output and excepts", "megatron/core/utils.py", "print(1)\n", "print; use core/utils/logging"),
    ("output and excepts", "megatron/core/utils.py", "try:\n    x = 1\nexcept:\n    x = 2\n", "catches everything"),
    (
        "output and excepts",
        "megatron/core/utils.py",
        "try:\n    x = 1\nexcept (ValueError, Exception):\n    x = 2\n",
        "catches everything",
    ),
    ("words", "megatron/core/utils.py", "x = '\u00e9'\n", "not ASCII"),
    ("words", "tests/test_a.py", "x = 1  # TO" + "DO: later\n", "write TODO(condition): what to do"),
    (
        "shapes",
        "megatron/core/tensor_parallel/f.py",
        'def f(x: "torch.Tensor"):\n    """Do it."""\n',
        "f: state the shapes of its tensors",
    ),
    ("readmes", "megatron/core/datasets/a.py", "", "missing"),
    ("readmes", "megatron/core/README.md", "line\n" * 121, "121 lines, at most 120"),
    ("paths", "megatron/core/README.md", "See `configs/none.py`.\n", "configs/none.py does not exist"),
    ("paths", "README.md", "See [docs](docs/none.md).\n", "docs/none.md does not exist"),
]

# (gate, file, text): what looks like a violation and is none
ALLOWED = [
    ("file", "megatron/core/utils.py", '"""Doc.\n' + "line\n" * 500 + '"""\n' + "# comment\n\n" * 500),
    ("function", "megatron/core/utils.py", LONG_KERNEL.replace("    x = 1\n", "", 1)),
    ("complexity", "megatron/core/utils.py", "@triton.jit\n" + FORK),
    (
        "parameters",
        "megatron/core/utils.py",
        "class F(Function):\n    def forward(ctx, a, b, c, d, e, f, g, h, i): ...\n",
    ),
    ("parameters", "megatron/core/utils.py", "def pretrain(a, b, c, d, e, f, g, h, i): ...\n"),
    ("parameters", "megatron/core/utils.py", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...\n"),
    ("layers", "megatron/core/utils.py", TYPED),
    ("global", "megatron/core/parallel_state.py", "def reset():\n    global X\n    X = None\n"),
    ("class attributes", "megatron/core/utils.py", "class A:\n    a = (1,)\n    b = frozenset({1})\n    c: list\n"),
    (
        "optional imports",
        "megatron/core/optional_deps.py",
        "try:\n    import apex\nexcept ImportError:\n    apex = None\n",
    ),
    ("environment", "megatron/core/env.py", "import os\nx = os.environ['A']\n"),
    ("names of choices", "megatron/core/transformer/moe/dispatchers/a.py", "x = name == 'alltoall'\n"),
    ("names of choices", "megatron/core/utils.py", "x = name == 'softmax'\ny = {'alltoall': 1}\n"),
    (
        "lifetimes",
        "megatron/core/utils.py",
        KEPT.replace("ctx.y = y", "ctx.y = y.shape[0]\n        ctx.save_for_backward(y)"),
    ),
    ("lifetimes", "megatron/core/utils.py", "tensor.resize_(0)\n"),
    ("output and excepts", "megatron/core/utils.py", "try:\n    x = 1\nexcept Exception:\n    raise\n"),
    ("words", "megatron/core/utils.py", "x = 1  # TO" + "DO(torch >= 2.15): drop the copy\n"),
    ("shapes", "megatron/core/tensor_parallel/f.py", "def f(\n    x: Tensor,  # [s, b, h]\n):\n    pass\n"),
    ("shapes", "megatron/core/tensor_parallel/f.py", "def _f(x: Tensor):\n    pass\n"),
    (
        "paths",
        "megatron/core/README.md",
        "Writes `metadata.json`, see `megatron/core/errors.py` and `core/configs/moe.py`.\n",
    ),
]


@pytest.fixture
def checkout(tmp_path):
    write(tmp_path, CLEAN)
    return tmp_path


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def texts(gate, root):
    return [str(finding) for finding in GATES[gate](Tree(root))]


@pytest.mark.parametrize("gate", GATES)
def test_clean_checkout_has_no_findings(gate, checkout):
    assert texts(gate, checkout) == []


@pytest.mark.parametrize(("gate", "file", "text", "message"), VIOLATIONS)
def test_gate_reports_seeded_violation(gate, file, text, message, checkout):
    write(checkout, {file: text})
    found = texts(gate, checkout)
    assert any(line.startswith(file.rpartition("/")[0]) and message in line for line in found), found


@pytest.mark.parametrize(("gate", "file", "text"), ALLOWED)
def test_gate_allows_what_only_looks_wrong(gate, file, text, checkout):
    write(checkout, {file: text})
    assert texts(gate, checkout) == []


def test_every_gate_has_a_seeded_violation():
    assert {gate for gate, *_ in VIOLATIONS} == set(GATES)


@pytest.mark.parametrize(
    ("file", "text", "is_dead"),
    [
        ("megatron/training/arguments.py", "def judge(args):\n    return args.unread_knob\n", True),
        ("megatron/training/arguments.py", "def model_overrides(args):\n    return args.unread_knob\n", False),
        ("megatron/core/configs/compat.py", "RULE = lambda config: config.unread_knob\n", True),
        ("megatron/training/loop.py", "def f(args):\n    args.unread_knob = 1\n", True),
        ("megatron/training/loop.py", "def f(args):\n    return args.n_knobs\n", False),
        ("megatron/core/transformer/mlp.py", "def f(config):\n    return getattr(config, 'unread_knob')\n", False),
        (
            "megatron/core/transformer/mlp.py",
            "def need(args, name):\n    return getattr(args, name)\n\n\nf = lambda args: need(args, 'unread_knob')\n",
            False,
        ),
        ("megatron/core/transformer/mlp.py", "def f(config):\n    return show('unread_knob')\n", True),
    ],
    ids=["argument-code", "derived", "rule", "written", "by-dest", "getattr", "own-getter", "only-named"],
)
def test_knob_is_dead_unless_acting_code_reads_it(file, text, is_dead, checkout):
    write(checkout, {"megatron/core/configs/more.py": KNOB, file: text})
    assert bool(texts("dead knobs", checkout)) is is_dead


def test_import_cycle_is_reported_with_its_modules(checkout):
    write(
        checkout,
        {
            "megatron/core/utils/a.py": "from megatron.core.utils import b\n",
            "megatron/core/utils/b.py": "def f():\n    import megatron.core.utils.c\n",
            "megatron/core/utils/c.py": "from megatron.core.utils.a import x\n",
            "megatron/core/utils/README.md": "",
        },
    )
    chain = "megatron.core.utils.a -> megatron.core.utils.b -> megatron.core.utils.c -> megatron.core.utils.a"
    assert texts("layers", checkout) == [f"megatron/core/utils/a:1: import cycle: {chain}"]


def test_two_cycles_that_share_no_module_are_two_findings():
    assert gates_imports.cycles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}, "e": {"a"}}) == [
        ["a", "b"],
        ["c", "d"],
    ]


def test_files_from_300_lines_are_warned_about_and_do_not_fail(checkout):
    write(checkout, {"megatron/core/utils.py": "x = 1\n" * 301})
    assert [finding.path for finding in gates_size.long_files(Tree(checkout))] == ["megatron/core/utils.py"]
    assert texts("file", checkout) == []


def test_waiver_covers_its_file_and_gate_only(checkout):
    write(checkout, {"megatron/core/utils.py": "print(1)\n", "megatron/training/a.py": "print(1)\n"})
    findings = GATES["output and excepts"](Tree(checkout))
    waivers = [Waiver("megatron/core/utils.py", "output and excepts", "shows")]
    assert [item.path for item in unwaived("output and excepts", findings, waivers)] == ["megatron/training/a.py"]
    assert len(unwaived("words", findings, waivers)) == 2


def test_waiver_that_covers_nothing_is_reported(checkout):
    waiver = Waiver("megatron/core/errors.py", "file", "long")
    assert unused(Tree(checkout), [waiver]) == [waiver]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.py | file\n", "waivers.txt:1: write `path | gate | reason`"),
        ("# head\na.py | size | long\n", "waivers.txt:2: write"),
        ("a.py | file | \n", "waivers.txt:1: write"),
        ("a.py | file | long\n" * 16, "16 waivers, at most 15"),
    ],
    ids=["two-parts", "unknown-gate", "no-reason", "too-many"],
)
def test_malformed_waivers_are_refused(tmp_path, text, message):
    file = tmp_path / "waivers.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match=message.split(":", 1)[0]) as caught:
        read_waivers(file)
    assert message in str(caught.value)
