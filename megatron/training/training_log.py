"""Sums of what steps report between two log lines.

Losses are averaged over the steps that the optimizer took; values of the routers over all microbatches. The line of the
first iteration resets nothing, so the first full interval still averages over all of its steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from megatron.training.train_state import StepResult


@dataclass
class IntervalSums:
    """Sums since the last reset; a fresh object is an empty interval."""

    losses: dict[str, float] = field(default_factory=dict)
    moe: dict[str, float] = field(default_factory=dict)
    """Values of the routers, weighted by microbatches."""
    num_moe_microbatches: int = 0
    num_advanced: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    """Skipped steps whose loss was inf or nan."""
    num_tokens: int = 0
    num_overflows: int = 0
    row_load: float | None = None
    """Highest load of any rank relative to a balanced routing; None if nobody counts rows."""

    def add_step(self, result: StepResult, num_tokens: int) -> None:
        """Count one step and the tokens it went through."""
        self.num_tokens += num_tokens
        self.num_overflows += result.num_overflows
        if result.row_load is not None:
            self.row_load = max(self.row_load or 0.0, result.row_load)
        if result.is_skipped:
            self.num_skipped += 1
            self.num_nan += any(not isfinite(loss) for loss in result.losses.values())
            return
        self.num_advanced += 1
        for key, loss in result.losses.items():
            self.losses[key] = self.losses.get(key, 0.0) + loss

    def add_moe(self, means: Mapping[str, float], num_microbatches: int) -> None:
        """Add the means per microbatch that the routers report for some microbatches."""
        self.num_moe_microbatches += num_microbatches
        for key, mean in means.items():
            self.moe[key] = self.moe.get(key, 0.0) + mean * num_microbatches

    def row_head_room(self, budget: float | None) -> float | None:
        """Share of a row budget that stayed free; None if nobody counts rows."""
        return None if budget is None or self.row_load is None else 1.0 - self.row_load / budget

    def num_steps(self) -> int:
        """All steps of the interval."""
        return self.num_advanced + self.num_skipped

    def mean_losses(self) -> dict[str, float]:
        """Mean per loss key over the advanced steps; empty if none advanced."""
        return {key: total / self.num_advanced for key, total in self.losses.items()}

    def mean_moe(self) -> dict[str, float]:
        """Mean per router value over the microbatches of the interval."""
        return {key: total / self.num_moe_microbatches for key, total in self.moe.items()}
