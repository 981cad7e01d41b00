"""The runner itself: command lines, and a comparison that lets nothing slip."""

import math

import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.functional_tests.cases import command_words, find_cases, rewind
from tests.functional_tests.golden import collect, compare, compare_ends, write_golden

GOLDEN = {"lm loss": dict.fromkeys(range(1, 13), 5.0), "num-zeros": dict.fromkeys(range(1, 13), 100.0)}


LATER = {step: 5.0 if step <= 10 else 5.012 for step in range(1, 13)}


def changed(metric, step, value):
    return {**GOLDEN, metric: {**GOLDEN[metric], step: value}}


def test_model_args_become_words():
    args = {"--bf16": True, "--fp16": False, "--lr": 1e-3, "--split": None, "--data-path": ["0.5", "${DATA_PATH}"]}
    assert command_words(args, {"DATA_PATH": "/d"}) == ["--bf16", "--lr", "0.001", "--data-path", "0.5", "/d"]


def test_unknown_case_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="no case nonsense; known are gpt/dense_fp32"):
        find_cases(["nonsense"])


@pytest.mark.parametrize(
    ("run", "is_same", "passes"),
    [
        pytest.param(GOLDEN, True, True, id="equal"),
        pytest.param(changed("lm loss", 3, 5.00001), True, False, id="fifth-decimal-same-machine"),
        pytest.param(changed("lm loss", 3, 5.00001), False, True, id="fifth-decimal-other-machine"),
        pytest.param(changed("lm loss", 10, 5.001), False, False, id="early-beyond-1e-4"),
        pytest.param(changed("lm loss", 11, 5.009), False, True, id="late-within-5e-3"),
        pytest.param(changed("lm loss", 11, 5.03), False, False, id="late-beyond-5e-3"),
        pytest.param({**GOLDEN, "lm loss": LATER}, False, False, id="late-mean-beyond-2e-3"),
        pytest.param(changed("lm loss", 3, math.nan), False, False, id="nan"),
        pytest.param(changed("num-zeros", 3, 119.0), False, True, id="count-within-a-fifth"),
        pytest.param(changed("num-zeros", 3, 200.0), False, True, id="one-stray-count-other-machine"),
        pytest.param({**GOLDEN, "num-zeros": dict.fromkeys(range(1, 13), 200.0)}, False, False, id="all-counts-stray"),
        pytest.param(changed("num-zeros", 3, 101.0), True, False, id="count-same-machine"),
        pytest.param({"lm loss": {1: 5.0}, "num-zeros": GOLDEN["num-zeros"]}, False, False, id="missing-steps"),
        pytest.param({"lm loss": GOLDEN["lm loss"]}, False, False, id="missing-metric"),
    ],
)
def test_comparison(run, is_same, passes):
    assert (compare(GOLDEN, run, is_same) == []) is passes


ROUTER = dict.fromkeys(range(1, 16), 1.0)


@pytest.mark.parametrize(
    ("steps", "passes"),
    [
        pytest.param({5: 1.0009}, True, id="first-within-a-thousandth"),
        pytest.param({5: 1.002}, False, id="first-beyond"),
        pytest.param({6: 1.05}, True, id="one-jump-later"),
        pytest.param(dict.fromkeys(range(6, 16), 1.009), True, id="mean-within-a-hundredth"),
        pytest.param(dict.fromkeys(range(6, 16), 0.98), False, id="mean-beyond"),
        pytest.param({15: math.nan}, False, id="nan"),
    ],
)
@pytest.mark.parametrize("name", ["seq_load_balancing_loss", "z_loss"])
def test_losses_of_routers_may_jump_later_but_not_in_the_mean(name, steps, passes):
    assert (compare({name: ROUTER}, {name: {**ROUTER, **steps}}, is_same_fingerprint=False) == []) is passes
    assert compare({name: ROUTER}, {name: {**ROUTER, **steps}}, is_same_fingerprint=True) != []


CURVE = {step: 9.0 if step <= 180 else 2.0 + 0.1 * (step % 2) for step in range(1, 201)}


@pytest.mark.parametrize(
    ("run", "passes"),
    [
        pytest.param({step: 5.0 if step <= 180 else 2.05 for step in CURVE}, True, id="same-end-on-another-way"),
        pytest.param({step: 1.009 * loss for step, loss in CURVE.items()}, True, id="within-a-hundredth"),
        pytest.param({step: 1.011 * loss for step, loss in CURVE.items()}, False, id="above"),
        pytest.param({step: 0.989 * loss for step, loss in CURVE.items()}, False, id="below"),
        pytest.param({**CURVE, 199: math.nan}, False, id="nan"),
        pytest.param({step: loss for step, loss in CURVE.items() if step < 200}, False, id="broke-off"),
    ],
)
def test_curves_are_compared_by_their_last_twenty_steps(run, passes):
    assert (compare_ends({"lm loss": CURVE}, {"lm loss": run}) == []) is passes


def test_curve_of_nans_fails_against_itself():
    nans = {"lm loss": {1: math.nan, 2: math.nan}}
    assert compare(nans, nans, is_same_fingerprint=True) == ["lm loss: 2 steps differ, first 1: nan for nan"]


@pytest.mark.parametrize(
    ("run", "passes"),
    [
        pytest.param(dict.fromkeys(range(1, 51), 1.04), True, id="within-a-twentieth"),
        pytest.param(dict.fromkeys(range(1, 51), 1.06), False, id="slower"),
        pytest.param({step: 1.0 if 30 <= step <= 45 else 9.0 for step in range(1, 51)}, True, id="warm-up-is-free"),
        pytest.param(dict.fromkeys(range(1, 51), math.nan), False, id="nan"),
    ],
)
def test_times_are_compared_by_the_median_of_the_middle(run, passes):
    golden = {"iteration-time": dict.fromkeys(range(1, 51), 1.0)}
    assert (compare(golden, {"iteration-time": run}, is_same_fingerprint=True) == []) is passes


@pytest.mark.parametrize(("value", "passes"), [(1040.0, True), (1060.0, False), (math.nan, False)])
def test_memory_may_differ_by_a_twentieth_everywhere(value, passes):
    golden = {"mem-allocated-bytes": {1: 1000.0}}
    assert (compare(golden, {"mem-allocated-bytes": {1: value}}, is_same_fingerprint=True) == []) is passes


def test_metrics_beside_the_log_come_from_tensorboard(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("mem-allocated-bytes", 1000.0, 3)
        writer.add_scalar("lm loss", 9.0, 3)
    log = " [x] iteration        3/     100 | lm loss: 5.4987081E+00 |\n"
    found = collect(log, ("lm loss", "mem-allocated-bytes"), tmp_path)
    assert found == {"lm loss": {3: 5.49871}, "mem-allocated-bytes": {3: 1000.0}}


def test_rewind_leaves_the_named_checkpoint_as_the_newest(tmp_path):
    for iteration in (5, 10):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    rewind(tmp_path, 5)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000005"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5\n"
    with pytest.raises(RuntimeError, match="nothing was saved at iteration 4"):
        rewind(tmp_path, 4)


def test_log_pieces_are_rounded_to_five_decimals():
    log = " [x] iteration        3/     100 | lm loss: 5.4987081E+00 | num zeros: 12 |\n"
    assert collect(log, ("lm loss", "num-zeros")) == {"lm loss": {3: 5.49871}, "num-zeros": {3: 12.0}}


@pytest.mark.parametrize("series", [{}, {1: math.nan}])
def test_golden_without_finite_values_is_refused(tmp_path, series):
    with pytest.raises(ValueError, match="all of them finite"):
        write_golden(tmp_path / "golden.json", {"lm loss": series})
