"""Whether the effects of a step may stay: flags on the device, decided once per step, equal on all ranks.

    begin                 flags are cleared, state that has no shadow yet is copied (`Rollback.save`)
    all microbatches      dispatchers report the rows they need, losses and norms whether they are finite
    agree                 one MAX all-reduce over the world: pipeline stages and ranks without experts take part
    clip, optimizer       `raised` is its found_inf: weights, moments and step counts stay as they were
    the host reads        nothing happened: the step counts. Too many rows: `Rollback.restore`, the step runs again

Nothing of a guarded step is read by the host before its end, so that a graph can replay it. What a step changes beside
weights and moments (expert bias, counters, metrics: the buffers of the model) is undone by the host before the next
step begins, so no module has to know of the guard.

Without an active guard nobody would learn of a dropped row: dispatchers then use exact sizes (`row_factor` is None).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.core.utils.collectives import MAX, all_reduce

OVERFLOW, NON_FINITE, LOAD = range(3)
NUM_FLAGS = 3
"""Places in `StepGuard.flags`."""


class StepGuard:
    """The flags of one step, fp32 [3] on the device: overflow (0 or 1), non-finite (0 or 1), highest load.

    `row_factor` is the budget of this step: rows relative to a balanced routing; None means exact sizes.
    """

    def __init__(self, device: torch.device, row_factor: float | None = None) -> None:
        self.flags = torch.zeros(NUM_FLAGS, dtype=torch.float32, device=device)
        self.row_factor = row_factor

    def begin(self) -> None:
        """Clear the flags at the start of a step."""
        self.flags.zero_()

    def report_rows(self, needed: torch.Tensor, budget: int, num_balanced: float) -> None:
        """Note that the fullest of `needed` int [...] must fit into `budget` rows; a balanced one is `num_balanced`.

        Host: no synchronisation. Reporting the same rows again changes nothing.
        """
        most = needed.max()
        self._raise(OVERFLOW, most > budget)
        self._raise(LOAD, most / max(num_balanced, 1e-20))

    def report_values(self, values: torch.Tensor) -> None:
        """Note whether all of `values` [...] are finite."""
        self._raise(NON_FINITE, ~values.isfinite().all())

    def report_non_finite(self, found: torch.Tensor) -> None:
        """Note a one-element flag [] or [1] that is above 0 if something was not finite."""
        self._raise(NON_FINITE, found.reshape(()) > 0)

    def _raise(self, index: int, value: torch.Tensor) -> None:
        flag = self.flags[index]
        flag.copy_(torch.maximum(flag, value.to(torch.float32)))

    def agree(self, group: dist.ProcessGroup | None) -> None:
        """Take the maximum of the flags over all ranks of `group`, the world."""
        all_reduce(self.flags, group, MAX)

    def raised(self) -> torch.Tensor:
        """Exactly 1.0 if nothing of this step may stay, else 0.0: fp32 []."""
        return self.flags[:LOAD].max()


class Rollback:
    """Copies of tensors from before a step, to undo what a step did to them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._live = list(tensors)
        self._before = [torch.empty_like(tensor) for tensor in self._live]

    def covers(self, tensors: Iterable[torch.Tensor]) -> bool:
        """True if these are the tensors, at the places they had when this was made."""
        return [tensor.data_ptr() for tensor in self._live] == [tensor.data_ptr() for tensor in tensors]

    @torch.no_grad()
    def save(self) -> None:
        """Copy, on the device; part of the step."""
        if self._live:
            torch._foreach_copy_(self._before, self._live)

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the last `save`."""
        if self._live:
            torch._foreach_copy_(self._live, self._before)


class _Active:
    """The guard of the step that runs now, if it has one."""

    def __init__(self) -> None:
        self.guard: StepGuard | None = None


_ACTIVE = _Active()


@contextmanager
def guarding(guard: StepGuard) -> Iterator[None]:
    """Run a step, forward and backward, under `guard`."""
    assert _ACTIVE.guard is None, "a guarded step inside a guarded step"
    _ACTIVE.guard = guard
    try:
        yield
    finally:
        _ACTIVE.guard = None


def active() -> StepGuard | None:
    """The guard of this step; None if the step reads the host and decides there."""
    return _ACTIVE.guard


def row_factor() -> float | None:
    """Rows that a rank provides for, relative to a balanced routing; None: exactly as many as come."""
    return None if _ACTIVE.guard is None else _ACTIVE.guard.row_factor


def reset() -> None:
    """Forget the active guard."""
    _ACTIVE.guard = None
