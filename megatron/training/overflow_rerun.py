"""What happens when a rank gets more rows than its budget: nothing of the step stays, and it runs again with more room.

    budgets in turn: --moe-expert-rank-capacity-factor, each of --moe-rank-capacity-tiers, without a limit

Before a step the random states are noted, and the step itself copies the buffers of the model (expert bias, counters,
metrics). After an overflow both go back; weights, moments and step counts were not touched, since the guard is the
optimizer's found_inf. The repeated step sees the same batch, so it is, bit for bit, the step of a run without budgets.
All ranks read the same guard and repeat the whole step together.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron.core.step_guard import Rollback
from megatron.core.tensor_parallel.random import DeviceRngState
from megatron.core.utils.logging import get_logger, log_single_rank

logger = get_logger(__name__)

RECOMMENDED_ROOM = 1.05
"""What the recommended factor adds to the highest load seen."""


@dataclass(frozen=True)
class StepReport:
    """What the host reads after a step; equal on all ranks."""

    is_overflow: bool
    is_non_finite: bool
    row_load: float
    """Rows of the fullest rank relative to a balanced routing; 0 if nothing was reported."""
    values: list[float]
    """What the step returned behind the flags."""


@dataclass
class OverflowRerun:
    """Repeats steps over a list of budgets; None, the last one, is no limit."""

    budgets: Sequence[float | None]
    device: torch.device
    counters: Counter[str]
    highest_load: float = 0.0
    rollback: Rollback = field(default_factory=lambda: Rollback([]))

    def watch(self, model: Sequence[torch.nn.Module]) -> bool:
        """Make sure that the rollback covers every buffer that the model has by now; True if it was made anew."""
        buffers = {buffer.data_ptr(): buffer for chunk in model for buffer in chunk.buffers() if buffer.numel()}
        if self.rollback.covers(buffers.values()):
            return False
        self.rollback = Rollback(buffers.values())
        return True

    def run(self, attempt: Callable[[float | None], StepReport]) -> tuple[StepReport, int]:
        """Run `attempt` with each budget in turn until no rank overflows; returns its report and the overflows."""
        saved = DeviceRngState(self.device) if len(self.budgets) > 1 else None
        load = 0.0
        for number, budget in enumerate(self.budgets):
            report = attempt(budget)
            load = max(load, report.row_load)
            self.highest_load = max(self.highest_load, load)
            if not report.is_overflow:
                return replace(report, row_load=load), number
            assert saved is not None, "rows were counted against a budget that is not there"
            self.counters["row overflows"] += 1
            self._log(budget, report.row_load)
            self.rollback.restore()
            saved.restore()
        raise AssertionError(f"an overflow without a limit; budgets are {self.budgets}")

    def _log(self, budget: float | None, load: float) -> None:
        count = self.counters["row overflows"]
        if count & (count - 1) == 0:  # the first, second, fourth, ... only
            text = (
                f"row overflow {count}: a rank needed {load:.3f} x a balanced load, the budget is {budget}; the step "
            )
            log_single_rank(logger, logging.WARNING, f"{text}is repeated. {self.recommendation()}")

    def recommendation(self) -> str:
        """The factor that would have held so far, with a little room."""
        factor = math.ceil(self.highest_load * RECOMMENDED_ROOM * 100) / 100
        return f"highest load so far {self.highest_load:.3f}: --moe-expert-rank-capacity-factor {factor:.2f} holds it"
