"""Every module imports on a machine that has nothing optional, and importing the core costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKED = ["triton", "transformer_engine", "deep_ep", "apex", "tensorboard", "torch.utils.tensorboard", "wandb"]
# a compiled extension that a machine without a compiler lacks
EXTENSIONS = {"megatron.core.datasets.helpers_cpp"}

IMPORT_ALL = """
import importlib, json, sys, traceback

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in BLOCKED):
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

BLOCKED, modules = json.loads(sys.argv[1])
sys.meta_path.insert(0, Blocker())
failed = {}
for module in modules:
    try:
        importlib.import_module(module)
    except Exception:
        failed[module] = traceback.format_exc()
print(json.dumps(failed))
"""


def product_modules():
    modules = set()
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(modules - EXTENSIONS)


def run_python(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def failures(modules):
    return json.loads(run_python(IMPORT_ALL, json.dumps([BLOCKED, modules])).splitlines()[-1])


def test_every_module_imports_without_optional_packages():
    assert failures(product_modules()) == {}


def test_blocked_package_is_seen_to_fail():
    assert set(failures(["triton", "megatron.core.errors"])) == {"triton"}


def test_importing_core_loads_no_torch():
    code = (
        "import sys, megatron.core; print(sorted(name for name in sys.modules if name.startswith(('torch', 'numpy'))))"
    )
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize(
    "name", ["ModelParallelConfig", "parallel_state", "tensor_parallel", "DistributedDataParallel"]
)
def test_core_offers_public_names_lazily(name):
    code = f"from megatron.core import {name}; print({name}.__name__.rpartition('.')[2])"
    assert run_python(code).strip() == name


def test_unknown_name_of_core_is_answered_with_the_known_ones():
    import megatron.core

    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'; it has .*parallel_state"):
        megatron.core.nonsense  # noqa: B018
