"""Golden values: their files, and how a run is compared with them.

A golden file holds Megatron's layout, {metric: {start_step, end_step, step_interval, values}}, and a fingerprint of
where it was recorded. nan fails always, on either side.

| metric                   | same fingerprint                  | elsewhere                                        |
|--------------------------|-----------------------------------|--------------------------------------------------|
| losses                   | equal to five decimals            | 1e-4 in the first ten steps, then 5e-3, relative |
|                          |                                   | and 2e-3 the mean of these later steps           |
| losses of routers        | equal to five decimals            | 1e-3 in the first five steps, then 1e-2 the mean |
| num-zeros                | equal                             | 0.20 relative, a few steps may stray             |
| mem-...-bytes            | 0.05 relative                     | 0.05 relative                                    |
| iteration-time (seconds) | median of the middle steps within 0.05 of the golden's                              |
| end of a curve           | equal to five decimals            | mean of the last 20 steps within 1e-2            |

Why losses of routers are compared otherwise: a balancing loss is E * sum_e (c_e / T k) * P_e, where c_e counts
choices. Two experts of one token whose scores tie up to rounding are a jump: on another processor the other one is
chosen, and the loss moves by E * (P_a - P_b) / T k, some 2e-3 with the 256 or 512 choices of these cases and
probabilities a tenth apart. Under torch's kernels for processors without vector units (ATEN_CPU_CAPABILITY=default)
fp32 runs stay within 1e-5 throughout; bf16 and FP8 runs within 8e-5 in the first five steps, then they stray up to
2e-2 in single steps and 7e-3 in the mean, while the loss of the model, an average over all tokens, strays by 3e-3 in
single steps and 1e-3 in the mean.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from tools.run_metrics import Metrics, Series, parse_log, read_tensorboard

DECIMALS = 5
EARLY_STEPS, EARLY_RTOL, LATE_RTOL, MEAN_RTOL = 10, 1e-4, 5e-3, 2e-3
FIRST_STEPS, FIRST_RTOL = 5, 1e-3
ROUTER_RTOL, COUNT_RTOL, MEMORY_RTOL, TIME_RTOL = 1e-2, 0.20, 0.05, 0.05
SHORT_RUN = 25
END_STEPS, END_RTOL = 20, 1e-2
ROUTER_LOSSES = ("load_balancing_loss", "z_loss")
LOG_NAMES = {"num-zeros": "num zeros"}
"""Metric in a golden file -> piece of the log line, where they differ."""


def _processor() -> str:
    """Vendor, family, model and stepping: matrix libraries choose kernels by them, and so the last bits."""
    keys = ("vendor_id", "cpu family", "model", "stepping")
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    return "/".join(found.get(key, "unknown") for key in keys)


def fingerprint() -> dict[str, Any]:
    """What decides whether two CPU runs have the same bits."""
    return {
        "torch": torch.__version__.split("+")[0],
        "architecture": platform.machine(),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
    }


def golden_path(folder: Path, environment: str = "cpu") -> Path:
    """File for this torch: golden_values_<major.minor>_<cpu|h200>.json."""
    version = ".".join(torch.__version__.split(".")[:2])
    return folder / f"golden_values_{version}_{environment}.json"


def find_golden(folder: Path, environment: str = "cpu") -> Path:
    """Return the file for this torch, else any of this environment; raises FileNotFoundError without one."""
    exact = golden_path(folder, environment)
    others = sorted(folder.glob(f"golden_values_*_{environment}.json"))
    if exact.exists() or not others:
        exact.open().close()
        return exact
    return others[-1]


def collect(log: str, metrics: tuple[str, ...], events: Path | None = None) -> Metrics:
    """Return the asked metrics, rounded as golden files hold them; a missing metric has no steps.

    They come from the log; what the log has not, from the TensorBoard folder `events` if there is one.
    """
    found = parse_log(log)
    if events is not None and events.is_dir():
        found = read_tensorboard(events) | found
    return {
        name: {step: round(value, DECIMALS) for step, value in found.get(LOG_NAMES.get(name, name), {}).items()}
        for name in metrics
    }


def write_golden(path: Path, metrics: Metrics) -> None:
    """Write a golden file; refuses empty metrics and values that are not finite."""
    content: dict[str, Any] = {"fingerprint": fingerprint()}
    for name, series in metrics.items():
        if not series or not all(math.isfinite(value) for value in series.values()):
            raise ValueError(f"{name}: {series}: a golden curve has values, all of them finite.")
        values = {str(step): series[step] for step in sorted(series)}
        content[name] = {"start_step": min(series), "end_step": max(series), "step_interval": 1, "values": values}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def compare(golden: Metrics, run: Metrics, is_same_fingerprint: bool) -> list[str]:
    """Return a sentence for each metric that does not fit; none means the run passes."""
    problems = []
    for name, expected in golden.items():
        got = run.get(name, {})
        if set(expected) != set(got):
            problems.append(f"{name}: {len(got)} steps, the golden has {len(expected)}")
            continue
        if name == "iteration-time":
            problems += _compare_times(expected, got)
            continue
        if name.endswith(ROUTER_LOSSES) and not is_same_fingerprint:
            problems += _compare_choices(name, expected, got)
            continue
        if not is_same_fingerprint and name != "num-zeros" and not name.startswith("mem-"):
            problems += _compare_means(name, expected, got, EARLY_STEPS, MEAN_RTOL)
        bad = [step for step in sorted(expected) if not _fits(name, step, expected, got, is_same_fingerprint)]
        if len(bad) > _allowed_bad_steps(name, len(expected), is_same_fingerprint):
            step = bad[0]
            problems.append(f"{name}: {len(bad)} steps differ, first {step}: {got[step]} for {expected[step]}")
    return problems


def end_of(series: Series) -> float:
    """Mean of the last 20 steps of a curve: one step says more about its batch than about the model."""
    return statistics.mean(series[step] for step in sorted(series)[-END_STEPS:])


def compare_ends(golden: Metrics, run: Metrics) -> list[str]:
    """Return a sentence for each metric whose curve has other steps or ends elsewhere."""
    problems = []
    for name, expected in golden.items():
        got = run.get(name, {})
        if set(expected) != set(got):
            problems.append(f"{name}: {len(got)} steps, the golden has {len(expected)}")
        elif not abs(end_of(got) - end_of(expected)) <= END_RTOL * end_of(expected):
            problems.append(f"{name}: ends at {end_of(got):.4f}, the golden at {end_of(expected):.4f}")
    return problems


def _fits(name: str, step: int, expected: Series, got: Series, is_same_fingerprint: bool) -> bool:
    want, value = expected[step], got[step]
    if not (math.isfinite(want) and math.isfinite(value)):
        return False
    if name.startswith("mem-"):
        return abs(value - want) <= MEMORY_RTOL * want
    if is_same_fingerprint:
        return want == value
    if name == "num-zeros":
        return abs(value - want) <= COUNT_RTOL * abs(want)
    return abs(value - want) <= (EARLY_RTOL if step <= EARLY_STEPS else LATE_RTOL) * abs(want)


def _compare_choices(name: str, expected: Series, got: Series) -> list[str]:
    """Compare a loss that jumps where two experts tie: the first steps one by one, the others by their mean."""
    first = [step for step in sorted(expected) if step <= FIRST_STEPS]
    bad = [step for step in first if not abs(got[step] - expected[step]) <= FIRST_RTOL * abs(expected[step])]
    if bad:
        return [f"{name}: {len(bad)} of the first steps differ: {got[bad[0]]} for {expected[bad[0]]} in step {bad[0]}"]
    return _compare_means(name, expected, got, FIRST_STEPS, ROUTER_RTOL)


def _compare_means(name: str, expected: Series, got: Series, last_early: int, rtol: float) -> list[str]:
    """Compare the means of the steps behind step `last_early`."""
    want, value = (
        statistics.mean([loss for step, loss in series.items() if step > last_early] or [0.0])
        for series in (expected, got)
    )
    if abs(value - want) <= rtol * abs(want):
        return []
    return [f"{name}: the mean behind step {last_early} is {value:.5f}, the golden's {want:.5f}"]


def _compare_times(expected: Series, got: Series) -> list[str]:
    """Compare the medians of steps 30 to 45, or 5 to 20 of a short run: warm-up and the last step do not count."""
    first, last = (5, 20) if max(expected) <= SHORT_RUN else (30, 45)
    want, value = (
        statistics.median([seconds for step, seconds in series.items() if first <= step <= last] or [math.nan])
        for series in (expected, got)
    )
    if abs(value - want) <= TIME_RTOL * want:
        return []
    return [f"iteration-time: the median of steps {first} to {last} is {value}, the golden's {want}"]


def _allowed_bad_steps(name: str, num_steps: int, is_same_fingerprint: bool) -> int:
    """Counts of another machine may stray in a few steps, as upstream allows; losses may not."""
    return min(max(num_steps // 100, 1), 50) if name == "num-zeros" and not is_same_fingerprint else 0
