"""A stand-in for Transformer Engine on a CPU: whole models train through the adapters, and calls are checked.

    fake_te.install()                                        the release of `fake_te_signatures`
    fake_te.install("2.5", without=("pytorch.autocast", "pytorch.Linear:save_original_input"))    less of it

What it cannot show is that the library computes what it says: that is for `tests/gpu_tests/test_transformer_engine.py`.
"""

import sys
import types
from typing import Any

from megatron.core import optional_deps
from tests.common import fake_te_fp8, fake_te_modules
from tests.common.fake_te_optimizer import FusedAdam
from tests.common.fake_te_signatures import VERSION, bound, signature_of

_NAMES = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common.recipe")


def install(version: str = VERSION, without: tuple[str, ...] = ()) -> types.ModuleType:
    """Make `import transformer_engine` find the stand-in; `without` as the column `evidence` of the probe's table."""
    root, pytorch, common, recipe = (types.ModuleType(name) for name in ("te", "pytorch", "common", "recipe"))
    missing = [entry.partition(":") for entry in without]
    for name in ("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention"):
        absent = tuple(argument for path, _, argument in missing if path == f"pytorch.{name}" and argument)
        base = getattr(fake_te_modules, name)
        setattr(pytorch, name, type(name, (base,), {"WITHOUT": absent}))
    for name in ("RMSNorm", "LayerNorm"):
        setattr(pytorch, name, getattr(fake_te_modules, name))
    pytorch.optimizers = types.SimpleNamespace(FusedAdam=FusedAdam)
    pytorch.autocast, pytorch.fp8_autocast = _autocast, _fp8_autocast
    recipe.Format = fake_te_fp8.FORMATS
    kinds = {"DelayedScaling": "delayed", "Float8CurrentScaling": "current", "Float8BlockScaling": "block"}
    for name, kind in kinds.items():
        setattr(recipe, name, _recipe_class(name, kind))
    root.pytorch, root.common, common.recipe, root.__version__ = pytorch, common, recipe, version
    for path, _, argument in missing:
        if path == "pytorch.optimizers.FusedAdam":
            pytorch.optimizers = types.SimpleNamespace()
        elif not argument:
            owner, name = path.rsplit(".", 1)
            delattr({"pytorch": pytorch, "common.recipe": recipe}[owner], name)
    sys.modules.update(zip(_NAMES, (root, pytorch, recipe), strict=True))
    optional_deps._attempt.cache_clear()
    fake_te_fp8.REGIONS.known.clear()
    fake_te_fp8.REGIONS.num_advanced = 0
    return root


def uninstall() -> None:
    """Undo `install`."""
    for name in _NAMES:
        sys.modules.pop(name, None)
    optional_deps._attempt.cache_clear()


def _autocast(*args: Any, **kwargs: Any) -> fake_te_fp8.Region:
    given = bound(signature_of("pytorch.autocast"), args, kwargs)
    return fake_te_fp8.Region(given.enabled, given.recipe)


def _fp8_autocast(*args: Any, **kwargs: Any) -> fake_te_fp8.Region:
    given = bound(signature_of("pytorch.fp8_autocast"), args, kwargs)
    return fake_te_fp8.Region(given.enabled, given.fp8_recipe)


def _recipe_class(name: str, kind: str) -> Any:
    def build(*args: Any, **kwargs: Any) -> types.SimpleNamespace:
        recipe = bound(signature_of(f"common.recipe.{name}"), args, kwargs)
        recipe.kind = kind
        return recipe

    return build
