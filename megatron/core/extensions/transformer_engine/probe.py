"""What the installed Transformer Engine can do: the one table of versions, and how the library is asked.

A feature is there if the name or argument that it came with is there: vendor builds and development versions reorder
releases. The release in the table is what messages name.
"""

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.optional_deps import require

PACKAGE = "transformer_engine"
NEEDED_BY = "transformer_impl='transformer_engine'"


@dataclass(frozen=True)
class Feature:
    """One thing that not every release has."""

    minimum: str
    """First release that has it."""
    evidence: str
    """Name below `transformer_engine`, or a name and, behind a colon, an argument of it."""
    below: str
    """What happens with an older release: what is done instead, or what is refused and what to use."""
    is_refused: bool = True
    """Asking for it below is an error."""


FEATURES = {
    "layers": Feature(
        "2.0", "pytorch.GroupedLinear:num_gemms", "no layer can be built; upgrade it, or use --transformer-impl local"
    ),
    "autocast": Feature("2.9", "pytorch.autocast", "`fp8_autocast` takes its place", is_refused=False),
    "delayed_scaling": Feature("1.0", "common.recipe.DelayedScaling", "upgrade it, or drop --fp8-format"),
    "current_scaling": Feature("2.2", "common.recipe.Float8CurrentScaling", "upgrade it, or use --fp8-recipe delayed"),
    "block_scaling": Feature("2.3", "common.recipe.Float8BlockScaling", "upgrade it, or use --fp8-recipe delayed"),
    "delayed_wgrad": Feature(
        "2.3", "pytorch.GroupedLinear:delay_wgrad_compute", "upgrade it, or drop --delay-wgrad-compute"
    ),
    "context_parallel": Feature(
        "1.10",
        "pytorch.DotProductAttention:cp_comm_type",
        "upgrade it, or use --attention-backend local",
    ),
    "save_original_input": Feature(
        "2.6",
        "pytorch.Linear:save_original_input",
        "FP8 layers behind a recomputed norm or activation keep codes of it, which cost one byte per element",
        is_refused=False,
    ),
    "fused_adam": Feature(
        "2.3",
        "pytorch.optimizers.FusedAdam:exp_avg_dtype",
        "upgrade it, or drop --use-precision-aware-optimizer",
    ),
}


@dataclass(frozen=True)
class Library:
    """Transformer Engine as it is installed here."""

    root: ModuleType
    """`transformer_engine`."""

    @property
    def version(self) -> str:
        """Release, as the package says."""
        return str(getattr(self.root, "__version__", "unknown"))

    def get(self, name: str) -> Any:
        """Return what has the dotted name below `transformer_engine`; None if there is nothing."""
        found: Any = self.root
        for part in name.split("."):
            found = getattr(found, part, None)
        return found

    def has(self, feature: str) -> bool:
        """Tell whether a feature of the table is there."""
        name, _, argument = FEATURES[feature].evidence.partition(":")
        found = self.get(name)
        if found is None or not argument:
            return found is not None
        return argument in inspect.signature(found).parameters

    def need(self, feature: str, needed_by: str) -> None:
        """Refuse what `needed_by`, as `field=value`, asks for if the feature is not there.

        Raises: ConfigError with the release that has it.
        """
        if not self.has(feature):
            row = FEATURES[feature]
            raise ConfigError(
                f"{needed_by}: needs Transformer Engine {row.minimum} ({row.evidence}), this is {self.version}; "
                f"{row.below}."
            )


def load_library(needed_by: str = NEEDED_BY) -> Library:
    """Return the library.

    Raises: MissingDependencyError with the step that installs it, ConfigError if it is too old for any layer.
    """
    require(PACKAGE, needed_by)
    importlib.import_module(f"{PACKAGE}.common.recipe")
    library = Library(importlib.import_module(PACKAGE))
    library.need("layers", needed_by)
    return library
