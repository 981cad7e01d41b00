"""`progress.txt` in the folder of --save (--log-progress): one line per start and per finished save of a job.

The lines of several jobs that continue one run stand below each other, tabs between the fields:

    2031-05-04 09:08:07  GPUs: 8  started job  iteration: 200  samples: 51200  tokens: 1.05E+08  FLOPs: 3.21E+17
    2031-05-04 09:38:07  GPUs: 8  saved checkpoint  iteration: 400  ...  TFLOP/s/GPU of the job: 181.2
"""

import time
from datetime import datetime
from pathlib import Path

from megatron.core.utils.logging import get_rank, get_world_size
from megatron.training.train_state import TrainingRun

PROGRESS_FILE = "progress.txt"


class ProgressFile:
    """Appends to the file on rank 0; other ranks write nothing."""

    def __init__(self, root: Path) -> None:
        self.path = root / PROGRESS_FILE
        self._start_time = time.monotonic()
        self._operations_at_start: float | None = None

    def line(self, event: str, run: TrainingRun) -> str:
        """What `event` means now; the first call marks the state from which the job started."""
        state, world_size = run.state, get_world_size()
        fields = [
            f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            f"GPUs: {world_size}",
            event,
            f"iteration: {state.iteration}",
            f"samples: {state.consumed_train_samples}",
            f"tokens: {state.consumed_train_samples * run.args.seq_length:.2E}",
            f"FLOPs: {state.floating_point_operations_so_far:.2E}",
        ]
        if self._operations_at_start is None:
            self._operations_at_start = state.floating_point_operations_so_far
        else:
            operations = state.floating_point_operations_so_far - self._operations_at_start
            seconds = time.monotonic() - self._start_time
            fields.append(f"TFLOP/s/GPU of the job: {operations / seconds / world_size / 1e12:.1f}")
        return "\t".join(fields)

    def append(self, line: str) -> None:
        """Add one line to the file."""
        if get_rank() == 0:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
