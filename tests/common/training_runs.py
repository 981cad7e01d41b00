"""`pretrain_gpt.py` in the process of a test: a run with callbacks, and what the logs of equal runs have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import training
from megatron.training.callbacks.base import Callback
from megatron.training.initialize import shut_down
from megatron.training.train_state import TrainingRun
from tools.run_metrics import parse_log, parse_state_hashes

VARYING = {"elapsed time per iteration (ms)", "row overflows", "row head room (%)"}
"""Figures that differ between runs whose steps are equal."""


@contextmanager
def fresh_program() -> Iterator[None]:
    """No process groups, and no log handler: one that another test made writes to the standard error of that test."""
    logging.getLogger("megatron").handlers.clear()
    try:
        yield
    finally:
        shut_down()
        logging.getLogger("megatron").handlers.clear()


def train(
    line: str, callbacks: Sequence[Callback] = (), forward_step: Callable = pretrain_gpt.forward_step
) -> TrainingRun:
    """Train with the flags of `line`, as the program does; the finished run."""
    return training.pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        argv=line.split(),
        callbacks=callbacks,
    )


def assert_same_run(log: str, other: str) -> None:
    """Same state after every step, and every figure of both logs the same."""
    assert parse_state_hashes(log) == parse_state_hashes(other)
    first, second = parse_log(log), parse_log(other)
    figures = set(first) - VARYING
    assert {"lm loss", "grad norm", "num zeros", "lm loss validation"} <= figures
    for name in figures:
        assert first[name] == second[name], name
