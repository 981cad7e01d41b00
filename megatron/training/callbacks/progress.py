"""A progress bar for a person at a terminal; files and pipes get plain log lines only."""

import sys
from typing import Any

from tqdm import tqdm

from megatron.core.utils.logging import get_rank, get_world_size
from megatron.training.callbacks.base import Callback
from megatron.training.train_state import StepResult, TrainingRun


def is_terminal() -> bool:
    """Whether this rank is the one that prints log lines, and prints them to a terminal."""
    return get_rank() == get_world_size() - 1 and sys.stdout.isatty()


class ProgressBar(Callback):
    """Draws iterations, speed and the latest loss on standard error, below the log lines."""

    def __init__(self) -> None:
        self._bar: Any = None

    @property
    def iterations_shown(self) -> int:
        """Where the bar stands."""
        return self._bar.n

    def on_train_start(self, run: TrainingRun) -> None:
        self._bar = tqdm(
            total=run.args.train_iters,
            initial=run.state.iteration,
            unit="step",
            dynamic_ncols=True,
            leave=False,
        )

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        # The log line of this step overwrites the bar's line; draw it again below.
        run.put_off.do()
        self._bar.update(run.state.iteration - self._bar.n)
        self._bar.set_postfix({key: f"{loss:.3f}" for key, loss in result.losses.items()})

    def on_train_end(self, run: TrainingRun) -> None:
        if self._bar is not None:
            self._bar.close()
