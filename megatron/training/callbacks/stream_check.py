"""--check-streams: watches the whole run for work and memory that streams use without order, and stops at a finding.

The recorder sees the construction of model, buffers and optimizer too, so that memory of the wrong stream is noticed;
what a step leaves behind is judged from the first step on. After each step the ranks also compare their collectives.
"""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.errors import StreamOrderError
from megatron.core.stream_check.collective_order import compare_records
from megatron.core.stream_check.recorder import StreamRecorder
from megatron.core.stream_check.report import report
from megatron.core.utils.collectives import all_gather_object, world_group
from megatron.core.utils.logging import get_logger, get_rank, log_single_rank
from megatron.training.callbacks.base import Callback
from megatron.training.train_state import StepResult, TrainingRun

logger = get_logger(__name__)


class StreamCheck(Callback):
    """Ends each step of the recorder, and the run if any rank has found something."""

    def __init__(self, recorder: StreamRecorder) -> None:
        self.recorder = recorder
        self.is_reported = False

    def on_train_start(self, run: TrainingRun) -> None:
        for chunk in run.model:
            for name, param in chunk.named_parameters():
                self.recorder.name({name: param})
                if getattr(param, "main_grad", None) is not None:
                    self.recorder.name({f"{name} main_grad": param.main_grad})
        self._finish()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        self._finish()
        run.counters["checked operations"] = self.recorder.num_operations

    def _finish(self) -> None:
        """Judge the step on all ranks; all leave together."""
        recorder = self.recorder
        recorder.finish_step()
        own = report(recorder.findings, get_rank(), recorder.num_operations) if recorder.findings else ""
        everyone = all_gather_object((own, recorder.collectives.take_records()), world_group())
        texts = [text for text, _ in everyone if text] + compare_records([records for _, records in everyone])
        if texts:
            self.is_reported = True
            raise StreamOrderError("\n".join(texts) if get_rank() == 0 else "see the report of rank 0")


@contextmanager
def checked_streams(args: argparse.Namespace) -> Iterator[list[Callback]]:
    """Watch the block with --check-streams; yields the callbacks for the loop.

    Raises: StreamOrderError on a finding.
    """
    if not args.check_streams:
        yield []
        return
    recorder = StreamRecorder(first_step=0)
    check = StreamCheck(recorder)
    try:
        with recorder:
            yield [check]
    except BaseException as error:
        if recorder.findings and not check.is_reported:  # the failure may well be their consequence
            text = report(recorder.findings, get_rank(), recorder.num_operations)
            raise StreamOrderError(f"{text}\nand then {type(error).__name__}: {error}") from error
        raise
    if recorder.findings:
        raise StreamOrderError(report(recorder.findings, get_rank(), recorder.num_operations))
    names = ", ".join(recorder.stream_names())
    log_single_rank(
        logger, logging.INFO, f"stream check: no findings in {recorder.num_operations} operations on {names}"
    )
