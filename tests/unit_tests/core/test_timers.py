"""Timers: accumulation, levels, and the text over ranks."""

import re
import time

import pytest

from megatron.core.timers import Timers

SLEEP = 0.01


def test_elapsed_adds_up_pairs_and_resets():
    timer = Timers(0, "max")("step", log_level=0)
    for _ in range(2):
        timer.start()
        time.sleep(SLEEP)
        timer.stop()
    assert 2 * SLEEP <= timer.elapsed() < 20 * SLEEP
    assert timer.elapsed() == 0.0
    assert timer.active_time() >= 2 * SLEEP


def test_elapsed_of_a_running_timer_lets_it_run_on():
    timer = Timers(0, "max")("step", log_level=0)
    timer.start()
    time.sleep(SLEEP)
    assert timer.elapsed(reset=False) >= SLEEP
    time.sleep(SLEEP)
    timer.stop()
    assert timer.elapsed() >= 2 * SLEEP


def test_second_start_is_refused_with_the_name():
    timer = Timers(0, "max")("step", log_level=0)
    timer.start()
    with pytest.raises(AssertionError, match=r"'step' is started twice"):
        timer.start()


def test_timer_above_the_level_measures_nothing():
    timers = Timers(1, "max")
    skipped = timers("inner", log_level=2)
    skipped.start()
    skipped.stop()
    assert timers.names() == []
    with pytest.raises(RuntimeError, match="above the timing log level"):
        skipped.elapsed()


def test_level_is_fixed_by_the_first_call():
    timers = Timers(2, "max")
    timers("step", log_level=1)
    with pytest.raises(AssertionError, match="has level 1, asked for with level 2"):
        timers("step", log_level=2)


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ("max", r"max time across ranks \(ms\):\n    step \.+: \d+\.\d\d$"),
        ("minmax", r"\(min, max\) time across ranks \(ms\):\n    step \.+: \(\d+\.\d\d, \d+\.\d\d\)$"),
        ("all", r"times across ranks \(ms\):\n    step \.+: 0: \d+\.\d\d$"),
    ],
)
def test_log_string_has_one_line_per_timer(option, pattern):
    timers = Timers(0, option)
    timers("step", log_level=0).start()
    timers("step").stop()
    assert re.fullmatch(pattern, timers.log_string())
    assert timers.log_string() is None


def test_write_adds_seconds_per_iteration():
    written = []

    class Writer:
        def add_scalar(self, *row):
            written.append(row)

    timers = Timers(0, "max")
    timers("step", log_level=0).start()
    time.sleep(SLEEP)
    timers("step").stop()
    timers.write(["step"], Writer(), iteration=7, normalizer=2.0)
    ((name, seconds, iteration),) = written
    assert (name, iteration) == ("step-time", 7)
    assert SLEEP / 2 <= seconds < 10 * SLEEP


@pytest.mark.parametrize(("level", "option", "named"), [(3, "max", "timing_log_level=3"), (0, "mean", "'mean'")])
def test_wrong_settings_are_named(level, option, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        Timers(level, option)
