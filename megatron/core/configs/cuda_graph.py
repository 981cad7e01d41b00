"""CUDA graphs: the whole training step as one replay."""

import dataclasses
from typing import Literal

from megatron.core.configs.base import ConfigTopic, Violation, violation

FEWEST_WARMUP_STEPS = 2
"""The first step creates what is created on first use, the second shows that nothing more is."""


@dataclasses.dataclass(kw_only=True)
class CudaGraphConfig(ConfigTopic):
    """Full-iteration CUDA graphs."""

    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    """full_iteration: forward, backward, reduction, clipping, optimizer and parameter gather are one replay."""

    cuda_graph_warmup_steps: int = 3
    """Training steps that run eagerly before the step is captured."""

    @property
    def captures_iteration(self) -> bool:
        """True if steps are captured whole."""
        return self.cuda_graph_impl == "full_iteration"

    def check(self) -> list[Violation]:
        """Only whole iterations are captured, after enough eager ones."""
        found = []
        if self.cuda_graph_impl in ("local", "transformer_engine"):
            reason = "graphs of single layers are left out: a graph of the whole step leaves less to the host"
            remedy = "use --cuda-graph-impl full_iteration, or none"
            found.append(violation(self, "cuda_graph_impl", reason, remedy))
        if self.captures_iteration and self.cuda_graph_warmup_steps < FEWEST_WARMUP_STEPS:
            reason = (
                "communicators, kernels and optimizer state are created in the first steps, which a capture forbids"
            )
            remedy = f"set --cuda-graph-warmup-steps to {FEWEST_WARMUP_STEPS} or more"
            found.append(violation(self, "cuda_graph_warmup_steps cuda_graph_impl", reason, remedy))
        return found
