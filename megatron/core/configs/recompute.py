"""Which activations are computed again in backward instead of being kept.

    full        whole layers: only their inputs are kept
                  uniform  all layers of a chunk, in groups of `recompute_num_layers`
                  block    the first `recompute_num_layers` layers of each chunk, one by one
    selective   single parts of each layer, `recompute_modules`

| module         | computed again                         | kept in its place          |
|----------------|----------------------------------------|----------------------------|
| core_attn      | attention between its projections      | query, key, value          |
| layernorm      | results of the two norms of a layer    | nothing: their input is    |
| mlp            | dense MLP                              | its input                  |
| moe            | router, exchange and experts           | its input and the routing  |
| moe_act        | activation of the routed experts       | nothing: its input is      |
| shared_experts | shared experts                         | nothing: their input is    |
"""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


@dataclasses.dataclass(kw_only=True)
class RecomputeConfig(ConfigTopic):
    """Activation recompute."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute whole layers (full) or parts of each layer (selective) again in backward; unset keeps everything."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Layers of full recompute: all in groups of --recompute-num-layers, or the first so many of each chunk."""

    recompute_num_layers: int | None = None
    """Layers in a group (uniform), or recomputed layers of each chunk (block)."""

    recompute_modules: list[RecomputeModule] | None = None
    """Parts that selective recompute computes again; core_attn if unset."""

    distribute_saved_activations: bool = False
    """Under full recompute keep one slice of each saved input on each TP rank and gather it in backward."""

    def derive(self) -> None:
        """Selective recompute starts with attention."""
        if self.recompute_granularity == "selective":
            self.fill("recompute_modules", ["core_attn"], "recompute_granularity=selective")

    def check(self) -> list[Violation]:
        """Each field belongs to one granularity."""
        is_full, is_selective = self.recompute_granularity == "full", self.recompute_granularity == "selective"
        found = []
        for name in ("recompute_method", "recompute_num_layers"):
            value = getattr(self, name)
            if is_full and value is None:
                found.append(
                    violation(self, f"recompute_granularity {name}", "whole layers are chosen by both", "set it")
                )
            if value is not None and not is_full:
                found.append(
                    violation(self, f"{name} recompute_granularity", "it chooses whole layers", "set full or drop it")
                )
        if self.recompute_num_layers is not None and self.recompute_num_layers < 1:
            found.append(violation(self, "recompute_num_layers", "a number of layers", "use 1 or more"))
        if self.recompute_modules is not None and not is_selective:
            names = "recompute_modules recompute_granularity"
            found.append(violation(self, names, "modules are parts of selective recompute", "set selective"))
        if self.distribute_saved_activations and not is_full:
            names = "distribute_saved_activations recompute_granularity"
            found.append(violation(self, names, "only inputs of whole layers are distributed", "set full"))
        return found
