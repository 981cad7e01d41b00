"""Reads the numbers of a training run: from its log, from TensorBoard events, or from a golden file.

Every reader returns {metric: {iteration: value}}. In a log the metrics are the pieces of the lines ("lm loss", "grad
norm", "learning rate", ...) and "<key> validation" from the evaluation blocks.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

Series = dict[int, float]
Metrics = dict[str, Series]

_ITERATION = re.compile(r"iteration +(\d+)/ *(\d+) \|")
_PIECE = re.compile(r" ([A-Za-z][^|:]*): +(\S+) \|")
_VALIDATION = re.compile(r"validation(-\S+)? loss at iteration (\d+)[^|]*\| (.*)")
_VALIDATION_PIECE = re.compile(r"([^|]+?) value: (\S+) \|")


def parse_log(text: str) -> Metrics:
    """Return the metrics of the training and evaluation lines of a log; other lines are passed over."""
    metrics: Metrics = {}
    for line in text.splitlines():
        step, evaluation = _ITERATION.search(line), _VALIDATION.search(line)
        if step:
            for key, value in _PIECE.findall(line[step.end() :]):
                _add(metrics, key, int(step[1]), value)
        elif evaluation:
            for key, value in _VALIDATION_PIECE.findall(evaluation[3]):
                _add(metrics, f"{key.strip()} validation{evaluation[1] or ''}", int(evaluation[2]), value)
    return metrics


def parse_state_hashes(text: str) -> dict[int, str]:
    """Return {iteration: hash} of a log written with --log-state-hash."""
    found = re.finditer(r"iteration +(\d+)/.* state hash: ([0-9a-f]{16}) \|", text)
    return {int(match[1]): match[2] for match in found}


def _add(metrics: Metrics, key: str, iteration: int, text: str) -> None:
    if re.fullmatch(r"[0-9a-f]{16}", text):
        return
    metrics.setdefault(key.strip(), {})[iteration] = float(text)


def read_golden(path: Path) -> Metrics:
    """Return the metrics of a golden file; steps without a value are nan."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    series = {key: entry for key, entry in stored.items() if isinstance(entry, dict) and "values" in entry}
    return {
        key: {int(step): math.nan if value == "nan" else float(value) for step, value in entry["values"].items()}
        for key, entry in series.items()
    }


def read_tensorboard(folder: Path) -> Metrics:
    """Return the scalars of all event files of a folder."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    metrics: Metrics = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
                metrics.setdefault(value.tag, {})[event.step] = number
    return metrics


def read_run(path: Path) -> Metrics:
    """Return the metrics of a run, by what `path` is: a folder of events, a golden .json, or a log."""
    if path.is_dir():
        return read_tensorboard(path)
    if path.suffix == ".json":
        return read_golden(path)
    return parse_log(path.read_text(encoding="utf-8", errors="replace"))
